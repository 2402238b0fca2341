"""Single calls that change state happen once, however often they are sent: whoever repeats a call gets the first one's answer.

A call is known by its method and its 16-byte call id. Answers are kept for the newest calls only; a call that failed or was given up
changed nothing that matters, so it is forgotten and may be tried again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from google.protobuf.message import Message
from trivet_proto.errors import invalid

CALL_ID_BYTES = 16
KEPT = 256

Answer = TypeVar("Answer", bound=Message)


class RecentCalls:
    """The newest calls with their answers, finished or under way."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._calls: OrderedDict[tuple[str, bytes], asyncio.Future[Message]] = OrderedDict()

    async def once(self, method: str, call_id: bytes, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """`work`'s answer, run now or remembered. An empty id is a call of its own. Raises INVALID_ARGUMENT for an id of another length."""
        if not call_id:
            return await work()
        if len(call_id) != CALL_ID_BYTES:
            raise invalid(f"the call id has {len(call_id)} bytes; it has {CALL_ID_BYTES}, or none", "call_id")
        key = (method, call_id)
        while (known := self._calls.get(key)) is not None:
            await asyncio.wait({known})
            if not known.cancelled():
                return cast(Answer, known.result())
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[key] = answer
        try:
            result = await work()
        except BaseException:
            answer.cancel()  # who waits for it takes it up himself
            del self._calls[key]
            raise
        answer.set_result(result)
        self._forget_old()
        return result

    def _forget_old(self) -> None:
        for key in list(self._calls)[: max(0, len(self._calls) - self._kept)]:
            if self._calls[key].done():
                del self._calls[key]
