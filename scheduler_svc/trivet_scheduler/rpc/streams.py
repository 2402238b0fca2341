"""The open streams of one service: one per name, each with the tasks that serve it.

Accepting a name ends the older stream of that name first, and tells it whether its own process dialled anew or another took the name: the
latter must not dial again, or the two would end each other's streams for ever. Reading, writing and watching a stream run side by side;
whichever ends first ends the others, and the handler returns only when all have ended, so that no task outlives its stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES

from trivet_scheduler.stream_end import StreamEnd

logger = logging.getLogger(__name__)

AnyMessage = TypeVar("AnyMessage", bound=Message)

LEAVE_S = 2.0  # how long an older stream's handler may take to leave before the newer one goes on


@dataclass(frozen=True, slots=True)
class _Held:
    """Who has a name: the instance of the process, and the end of its stream."""

    instance: bytes
    end: StreamEnd


class OpenStreams:
    """By name, and how many there are, older ones on their way out included."""

    def __init__(self, peer: str) -> None:
        """`peer` is the word for who dials: worker, frontend."""
        self._peer = peer
        self._by_name: dict[str, _Held] = {}
        self._num_open = 0

    def __len__(self) -> int:
        return self._num_open

    @asynccontextmanager
    async def hold(self, name: str, instance: bytes, end: StreamEnd) -> AsyncIterator[None]:
        """The place of `name`, for the newest who asks: the older stream has ended when this is entered.

        Raises what the older one ends with when a still newer stream came meanwhile: ABORTED where that is of the same process `instance`,
        ALREADY_EXISTS where it is of another.
        """
        self._num_open += 1
        older = self._by_name.get(name)
        self._by_name[name] = _Held(instance, end)
        try:
            if older is not None:
                older.end.decide(self._replaced(name, is_same=older.instance == instance))
                if not await older.end.until_left(LEAVE_S):
                    logger.warning("the older stream of %s %s did not leave within %g s", self._peer, name, LEAVE_S)
                if end.is_decided:
                    await end.wait()
            yield
        finally:
            self._num_open -= 1
            held = self._by_name.get(name)
            if held is not None and held.end is end:
                del self._by_name[name]
            end.leave()

    def _replaced(self, name: str, *, is_same: bool) -> TrivetError:
        """What the older stream of `name` ends with."""
        if is_same:
            logger.info("%s %s has dialled anew: its older stream ends", self._peer, name)
            return TrivetError(ErrorKind.ABORTED, f"{self._peer} {name} has dialled anew: this stream is of an older epoch")
        logger.warning("another process has come as %s %s: the older one's stream ends", self._peer, name)
        message = f"another {self._peer} has come to this scheduler under the name {name}: give each {self._peer} its own --name"
        return TrivetError(ErrorKind.ALREADY_EXISTS, message, param="name")


async def side_by_side(name: str, **works: Coroutine[Any, Any, None]) -> None:
    """Run until the first of `works` has ended, and end the others. Raises what that one died of."""
    tasks = [asyncio.create_task(work, name=f"{name}: {what}") for what, work in works.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def checked(messages: AsyncIterator[AnyMessage]) -> AsyncIterator[AnyMessage]:
    """What the peer sends. Raises INVALID_ARGUMENT for bytes that are no message, TOO_LARGE for one over the limit of streams."""
    while True:
        try:
            message = await anext(messages, None)
        except DecodeError:
            raise invalid("the bytes of a message on this stream cannot be read as one") from None
        if message is None:
            return
        size = message.ByteSize()
        if size > MAX_STREAM_MESSAGE_BYTES:
            raise TrivetError(
                ErrorKind.TOO_LARGE,
                f"a message of {size} bytes; on a stream at most {MAX_STREAM_MESSAGE_BYTES} are taken: cut it into parts",
            )
        yield message
