"""Server-sent events over ASGI, and what both kinds of answer do when the client leaves.

An answer is a race between the work and the client's going: whichever ends first ends the other. Errors after the first byte travel as a
`data:` event, since other field names are ignored by client libraries, which then take a failure for an empty success.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trivet_frontend.openai.connection import ABORT_KEY
from trivet_frontend.openai.errors import as_trivet_error, error_body
from trivet_frontend.openai.middleware import SEND_BODY_KEY

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# A comment: clients drop it, and whatever stands between sees that the stream lives.
KEEPALIVE = b": keep-alive\n\n"
LOOKS_PER_LIMIT = 3


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """In seconds: after how much silence a stream sends a comment (0: never), and how long its client may read nothing."""

    keepalive: float
    slow_client: float


class EventStream(Response):
    """Sends what `events` yields, each piece as it comes, and a comment when there is nothing; closes it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, limits: StreamLimits, on_unsent: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # A stream has no length; the base class has put one for its empty body.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._limits = limits
        # A generator that was never begun runs no clean-up of its own.
        self._on_unsent = on_unsent
        # Since when the piece at hand is being written, and since when there is silence; at most one of them.
        self._writing_since: float | None = None
        self._silent_since: float | None = None
        # Cleared while a comment is being written.
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get(SEND_BODY_KEY, send)

        async def look() -> None:
            await self._look(scope, send_body)

        every = min(self._limits.keepalive or self._limits.slow_client, self._limits.slow_client) / LOOKS_PER_LIMIT
        try:
            await run_while_connected(receive, lambda: self._send_all(send, send_body), look=look, every=every)
        finally:
            self._on_unsent()

    async def _send_all(self, send: Send, send_body: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for piece in events:
                    await self._may_write.wait()
                    await self._put(send_body, piece)
            except Exception as error:
                await self._may_write.wait()
                await self._put(send_body, event(error_body(as_trivet_error(error))))
            await self._may_write.wait()
            self._silent_since = None
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, piece: bytes) -> None:
        self._writing_since, self._silent_since = time.monotonic(), None
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._writing_since, self._silent_since = None, time.monotonic()

    async def _look(self, scope: Scope, send: Send) -> None:
        """Cut a client that takes nothing, keep a silent stream alive."""
        now = time.monotonic()
        if self._writing_since is not None and now - self._writing_since > self._limits.slow_client:
            logger.warning("a client has not read its stream for %g s: its connection is cut", self._limits.slow_client)
            # Nothing else gets rid of what is unsent.
            if (abort := scope.get(ABORT_KEY)) is not None:
                abort()
            raise ClientDisconnect
        if self._silent_since is not None and self._limits.keepalive and now - self._silent_since >= self._limits.keepalive:
            self._may_write.clear()
            await self._put(send, KEEPALIVE)
            self._may_write.set()


async def run_while_connected(
    receive: Receive,
    work: Callable[[], Awaitable[ResultT]],
    *,
    look: Callable[[], Awaitable[None]] | None = None,
    every: float | None = None,
) -> ResultT:
    """The result of `work`; cancels it and raises `ClientDisconnect` when the client leaves first.

    `look` is called each `every` seconds meanwhile, and what it raises ends the work.
    """
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        while True:
            done, _ = await asyncio.wait((working, leaving), timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if done:
                raise ClientDisconnect
            if look is not None:
                await look()
    finally:
        # Also when this task itself is cancelled: nothing may go on behind it.
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def answer_while_connected(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    return await run_while_connected(request.receive, work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
