"""One HTTP connection with limits: how many there may be, how long the head of a request may take to come and how large it may be.

What uvicorn's own connection does is left as it is. The time limit on the body is the handlers' (`body.py`), the one on a client that does
not read its answer the stream's (`sse.py`), which is given the means to cut the connection here.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from trivet_proto.errors import ErrorKind, TrivetError
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trivet_frontend.openai.errors import error_body

ABORT_KEY = "trivet.abort"
"""Of a request's scope: a function that cuts its connection at once, whatever is unsent."""

MAX_HEAD_BYTES = 64 * 1024


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
        # Of the head that is coming; None between a head and the next.
        self._head_bytes: int | None = None

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
        if self.transport.is_closing():
            return
        if self._head_bytes is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        # Judged afterwards: one read may bring a head and much of its body.
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"the head of a request may have {MAX_HEAD_BYTES} bytes"
            self._refuse(b"431 Request Header Fields Too Large", TrivetError(ErrorKind.INVALID_ARGUMENT, message))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._head_bytes = None
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self._limits.header_timeout, self._give_up)

    def _give_up(self) -> None:
        if not self._head_bytes:  # nobody has asked for anything
            self.transport.close()
            return
        message = f"the head of the request did not come within {self._limits.header_timeout:g} s"
        self._refuse(b"408 Request Timeout", TrivetError(ErrorKind.DEADLINE_EXCEEDED, message))

    def _refuse(self, status: bytes, error: TrivetError, headers: bytes = b"") -> None:
        body = error_body(error)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body), headers) + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
