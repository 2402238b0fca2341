"""Reading a request's body within the limit."""

import asyncio

from starlette.requests import ClientDisconnect, Request
from trivet_proto.errors import ErrorKind, TrivetError

# What is over the limit is read and thrown away up to here, for a client that is still sending cannot read an answer.
DISCARD_FACTOR = 4
DISCARD_SECONDS = 10.0


async def read_body(request: Request, *, limit: int, timeout_s: float) -> bytes:
    """The body; raises TOO_LARGE beyond `limit` bytes and DEADLINE_EXCEEDED when it does not come in time."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        if int(declared) <= DISCARD_FACTOR * limit:
            await _discard(request, DISCARD_FACTOR * limit)
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece = message.get("body", b"")
                size += len(piece)
                if size > limit:
                    break
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise TrivetError(ErrorKind.DEADLINE_EXCEEDED, f"the body did not come within {timeout_s:g} s") from None
    if message.get("more_body", False):
        await _discard(request, (DISCARD_FACTOR - 1) * limit)
    raise _too_large(limit)


async def _discard(request: Request, most: int) -> None:
    size = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while size <= most:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return


def _too_large(limit: int) -> TrivetError:
    return TrivetError(ErrorKind.TOO_LARGE, f"the body is larger than the limit of {limit} bytes")
