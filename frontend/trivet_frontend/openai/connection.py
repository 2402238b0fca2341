"""One HTTP connection with limits: how many there may be, how long the head of a request may take to come and how large it may be.

What cannot be read as HTTP is answered as all errors are; what uvicorn's own connection does besides is left as it is. The time limit on
the body is the handlers' (`body.py`), the one on a client that does not read its answer the stream's (`sse.py`), which is given the means
to cut the connection here.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trivet_frontend.openai.errors import error_body, error_response

ABORT_KEY = "trivet.abort"
"""Of a request's scope: a function that cuts its connection at once, whatever is unsent."""

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, with their separators and the empty line behind them."""

TOO_LARGE = invalid(f"the head of a request may have {MAX_HEAD_BYTES} bytes")
LINGER_S = 1.0  # for a client that is still sending to read why nobody listens
MOST_WORDS = 200  # of the parser, on what it could not read


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Times are in seconds."""

    connections: int
    header_timeout: float


class LimitedConnection(HttpToolsProtocol):
    """Answers 503, 408 or 431 and closes when a limit is passed."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        # Of the head that is coming, as read; None between a head and the next.
        self._head_bytes: int | None = None
        self._reads_body = False
        # Refused: what still comes is thrown away.
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            message = f"{self._limits.connections} connections are open here, which is the limit"
            self._refuse(b"503 Service Unavailable", TrivetError(ErrorKind.UNAVAILABLE, message), b"retry-after: 1\r\n")
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over or self.transport.is_closing():
            return
        if self._head_timer is None and not self._reads_body and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()  # it is served as if it had asked for none
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)
        # Judged afterwards: one read may bring a head and much of its body.
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self._is_over:
            self._refuse_midway(b"431 Request Header Fields Too Large", TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_bytes is None:
            self._head_bytes = 0  # behind a request that is still being answered
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._head_bytes, self._reads_body = None, True
        if self._size_of_head() > MAX_HEAD_BYTES:
            # It came whole in one read. Answered in its turn, behind the requests before it; its target need not be one that can be read.
            self.url, self.app = b"/", _answer_too_large
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_body = False
        super().on_message_complete()

    def _size_of_head(self) -> int:
        line = len(self.parser.get_method()) + len(self.url) + len(b"  HTTP/1.1\r\n")
        return line + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers) + len(b"\r\n")

    def _await_head(self) -> None:
        self._head_bytes = self._head_bytes or 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self._limits.header_timeout, self._give_up)

    def _give_up(self) -> None:
        if not self._head_bytes:  # nobody has asked for anything
            self.transport.close()
            return
        message = f"the head of the request did not come within {self._limits.header_timeout:g} s"
        self._refuse(b"408 Request Timeout", TrivetError(ErrorKind.DEADLINE_EXCEEDED, message))

    def _refuse_malformed(self, error: httptools.HttpParserError) -> None:
        """400 for what cannot be read; nothing behind it on this connection can be either."""
        # Our own callbacks fail on nothing but the target.
        words = "its target is not a URL's" if isinstance(error, httptools.HttpParserCallbackError) else str(error)[:MOST_WORDS]
        logger.warning("what %s sent is not HTTP: %s", "a client" if self.client is None else self.client[0], words)
        self._refuse_midway(b"400 Bad Request", invalid(f"the request cannot be read as HTTP: {words}"))

    def _refuse_midway(self, status: bytes, error: TrivetError) -> None:
        """Refuse a client that may be sending still: were the connection closed on what is unread, the answer would be lost with it."""
        self._is_over = True
        if self._is_answering_another():
            self.transport.close()  # what is written now would be read as that one's answer
            return
        self._write_refusal(status, error)
        self.transport.write_eof()
        if self.cycle is not None:
            # What runs for this client has lost it.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._stop_timer()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _is_answering_another(self) -> bool:
        """A request that came before what is refused now, and wholly."""
        running = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (running and (self.cycle.response_started or not self.cycle.more_body))

    def _refuse(self, status: bytes, error: TrivetError, headers: bytes = b"") -> None:
        self._write_refusal(status, error, headers)
        self.transport.close()

    def _write_refusal(self, status: bytes, error: TrivetError, headers: bytes = b"") -> None:
        body = error_body(error)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body), headers) + body)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def _answer_too_large(scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_response(TOO_LARGE)
    answer.status_code = 431
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)
