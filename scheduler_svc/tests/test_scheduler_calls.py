"""The memory of recent calls."""

import asyncio

import pytest
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2
from trivet_scheduler.rpc.calls import RecentCalls


def call_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Counted:
    """Work that says how often it was done."""

    def __init__(self) -> None:
        self.done = 0
        self.fails = False

    async def __call__(self) -> engine_pb2.ResetPrefixCacheResponse:
        await asyncio.sleep(0)
        if self.fails:
            raise TrivetError(ErrorKind.UNAVAILABLE, "not now")
        self.done += 1
        return engine_pb2.ResetPrefixCacheResponse(blocks_dropped=self.done)


async def test_an_answer_is_remembered_by_method_and_id() -> None:
    calls, work = RecentCalls(), Counted()
    assert (await calls.once("a", call_id(1), work)).blocks_dropped == 1
    assert (await calls.once("a", call_id(1), work)).blocks_dropped == 1
    assert (await calls.once("b", call_id(1), work)).blocks_dropped == 2
    assert (await calls.once("a", b"", work)).blocks_dropped == 3
    assert (await calls.once("a", b"", work)).blocks_dropped == 4


async def test_calls_side_by_side_are_one() -> None:
    calls, work = RecentCalls(), Counted()
    answers = await asyncio.gather(*(calls.once("a", call_id(1), work) for _ in range(5)))
    assert [answer.blocks_dropped for answer in answers] == [1] * 5


async def test_a_call_that_failed_may_be_tried_again() -> None:
    calls, work = RecentCalls(), Counted()
    work.fails = True
    with pytest.raises(TrivetError, match="not now"):
        await calls.once("a", call_id(1), work)
    work.fails = False
    assert (await calls.once("a", call_id(1), work)).blocks_dropped == 1


async def test_only_the_newest_are_kept() -> None:
    calls, work = RecentCalls(kept=3), Counted()
    for number in range(1, 6):
        await calls.once("a", call_id(number), work)
    assert (await calls.once("a", call_id(5), work)).blocks_dropped == 5
    assert (await calls.once("a", call_id(1), work)).blocks_dropped == 6
