"""Server-sent events over ASGI, and what both kinds of answer do when the client leaves.

An answer is a race between the work and the client's going: whichever ends first ends the other. Errors after the first byte travel as a
`data:` event, since other field names are ignored by client libraries, which then take a failure for an empty success.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trivet_frontend.openai.errors import as_trivet_error, error_body

ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, each piece as it comes; closes it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_unsent: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # A stream has no length; the base class has put one for its empty body.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        # A generator that was never begun runs no clean-up of its own.
        self._on_unsent = on_unsent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, lambda: self._send_all(send))
        finally:
            self._on_unsent()

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": event(error_body(as_trivet_error(error))), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_while_connected(receive: Receive, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """The result of `work`; cancels it and raises `ClientDisconnect` when the client leaves first."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
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
