"""Callers that leave, in every way and at every point, two hundred of each: nothing of them is left, and the scheduler was told."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio
import pytest
from trivet_chassis.rpc import create_channel
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

TIMES = 200
AT_ONCE = 50
LEAVE_SECONDS = 3.0
LONG_TEXT = "The capital of France is " * 200


class Watched:
    """A frontend, and what must be as before when all callers have gone."""

    def __init__(self, frontend, scheduler) -> None:
        self.frontend = frontend
        self.scheduler = scheduler

    def observed(self) -> dict[str, int]:
        return {
            "tasks": len(asyncio.all_tasks()),
            "streams": self.frontend.inference.streams.count,
            "inside": self.frontend.inference.requests_inside,
            "handles": self.frontend._engine.handles,
            "at the scheduler": len(self.scheduler.live),
        }

    async def many(self, one: Callable[[int], Awaitable[None]]) -> None:
        """`one` many times, some at a time; then nothing may be left."""
        before = self.observed()
        for start in range(0, TIMES, AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(start, start + AT_ONCE)))
        await self.until(before)

    async def until(self, before: dict[str, int]) -> None:
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                while any(value > before[name] for name, value in self.observed().items()):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{self.observed()} after {before}: {[task.get_name() for task in asyncio.all_tasks()][:20]}")


@pytest.fixture
async def watched(frontend, scheduler) -> Watched:
    scheduler.pause_after = 1
    return Watched(frontend, scheduler)


@contextlib.asynccontextmanager
async def posted(watched: Watched, **body: object) -> AsyncIterator[asyncio.StreamReader]:
    """A completion asked for over a connection of its own, which is closed without a word."""
    host, port = watched.frontend.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps({"prompt": "x", "max_tokens": 50} | body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def test_streams_closed_after_their_first_token(watched) -> None:
    async def one(number: int) -> None:
        async with posted(watched, stream=True, n=1 + number % 2) as reader:
            await reader.readuntil(b"data: {")

    await watched.many(one)
    assert len(watched.scheduler.aborted) == TIMES * 3 / 2


async def test_answers_that_nobody_waits_for(watched) -> None:
    async def one(number: int) -> None:
        uids = len(watched.scheduler.adds)
        async with posted(watched):
            await watched.scheduler.until(lambda: len(watched.scheduler.adds) > uids)

    await watched.many(one)


async def test_requests_closed_while_they_are_queued(watched) -> None:
    watched.scheduler.flowing.clear()

    async def one(number: int) -> None:
        uids = len(watched.scheduler.adds)
        async with posted(watched, stream=number % 2 == 0):
            await watched.scheduler.until(lambda: len(watched.scheduler.adds) > uids)

    await watched.many(one)


async def test_requests_closed_while_they_are_tokenized_or_before(watched) -> None:
    async def one(number: int) -> None:
        async with posted(watched, prompt=LONG_TEXT, stream=number % 2 == 0):
            for _ in range(number % 8):
                await asyncio.sleep(0)

    await watched.many(one)


@contextlib.asynccontextmanager
async def stub_of(watched: Watched) -> AsyncIterator[InferenceServiceStub]:
    async with create_channel(watched.frontend.grpc_address) as channel:
        yield InferenceServiceStub(channel)


REQUEST = inference_pb2.CompleteRequest(text="x", params=inference_pb2.GenerationParams(max_tokens=50))


async def test_calls_that_are_cancelled(watched) -> None:
    before = watched.observed()
    async with stub_of(watched) as stub:

        async def one(number: int) -> None:
            call = stub.Complete(REQUEST)
            if number % 2:
                await call.read()
            call.cancel()

        await asyncio.gather(*(one(number) for number in range(TIMES)))
    await watched.until(before)


async def test_calls_whose_deadline_passes(watched) -> None:
    before = watched.observed()
    async with stub_of(watched) as stub:

        async def one() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Complete(REQUEST, timeout=0.3):
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        for _ in range(0, TIMES, AT_ONCE):
            await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    await watched.until(before)
    assert all(0 < add.timeout_ms <= 300 for add in watched.scheduler.adds)


async def test_calls_that_are_dropped_and_callers_that_vanish(watched) -> None:
    before = watched.observed()
    async with stub_of(watched) as stub:

        async def one() -> None:
            await stub.Complete(REQUEST).read()

        await asyncio.gather(*(one() for _ in range(TIMES)))
        gc.collect()
    await watched.until(before)


async def test_after_all_of_it_a_request_is_served_at_once(watched) -> None:
    await test_streams_closed_after_their_first_token(watched)
    watched.scheduler.pause_after = None
    async with posted(watched, max_tokens=3) as reader:
        assert b'"finish_reason":"length"' in await reader.readuntil(b"}]")
