"""What is tried again, how often, after what wait; never anything of which the caller has seen a part."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from trivet_chassis.rpc import abort
from trivet_client import (
    CancelledCallError,
    ErrorKind,
    InvalidRequestError,
    NotServedError,
    RetryPolicy,
    SamplingParams,
    Started,
    TrivetError,
    UnavailableError,
)
from trivet_client.retrying import Attempts
from trivet_proto.v1 import inference_pb2, inference_pb2_grpc

GONE = TrivetError(ErrorKind.UNAVAILABLE, "nobody is there")
QUICK = RetryPolicy(attempts=4, first_wait=0.001, growth=1)


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Fails as it is told, then answers."""

    def __init__(self) -> None:
        self.failures: list[TrivetError] = []
        self.breaks_after_start = False
        self.calls = 0

    async def _fail_if_told(self, context: Any) -> None:
        self.calls += 1
        if self.failures:
            await abort(context, self.failures.pop(0))

    async def ListModels(self, request, context):
        await self._fail_if_told(context)
        return inference_pb2.ListModelsResponse(models=[inference_pb2.PublicModel(name="model")])

    async def Chat(self, request, context):
        await self._fail_if_told(context)
        yield inference_pb2.ChatResponse(event=inference_pb2.GenerationEvent(started=inference_pb2.Started(model="model")))
        if self.breaks_after_start:
            await abort(context, GONE)
        yield inference_pb2.ChatResponse(event=inference_pb2.GenerationEvent(finished=inference_pb2.Finished(finish_reason="stop")))


@pytest.fixture
def server_address(background) -> Iterator[tuple[Server, str]]:
    servicer = Server()

    async def started(address: str) -> grpc.aio.Server:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        server.add_insecure_port(address)
        await server.start()
        return server

    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        address = f"unix:{folder}/frontend.sock"
        server = background.run(started(address))
        yield servicer, address
        background.run(server.stop(0))


CALLS = [("models",), ("chat", "Hello")]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
async def test_a_call_that_found_nobody_is_made_again(server_address, connect, call) -> None:
    server, address = server_address
    side = connect(address, retry=QUICK)
    server.failures = [GONE] * 3
    assert await side.call(*call)
    assert server.calls == 4


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
async def test_after_the_last_attempt_the_error_is_the_callers(server_address, connect, call) -> None:
    server, address = server_address
    side = connect(address, retry=QUICK)
    server.failures = [GONE] * 5
    with pytest.raises(UnavailableError, match="nobody is there"):
        await side.call(*call)
    assert server.calls == 4


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
@pytest.mark.parametrize(
    "error",
    [
        TrivetError(ErrorKind.UNAVAILABLE, "gone for good", retryable=False),
        TrivetError(ErrorKind.OVERLOADED, "full", retry_after_ms=1),
        TrivetError(ErrorKind.ABORTED, "replaced"),
        TrivetError(ErrorKind.INTERNAL, "broken"),
        TrivetError(ErrorKind.INVALID_ARGUMENT, "wrong", param="n"),
    ],
    ids=lambda error: error.message,
)
async def test_nothing_else_is_tried_again(server_address, connect, error: TrivetError, call) -> None:
    server, address = server_address
    side = connect(address, retry=QUICK)
    server.failures = [error]
    with pytest.raises(TrivetError, match=error.message) as caught:
        await side.call(*call)
    assert (caught.value.kind, server.calls) == (error.kind, 1)


async def test_nothing_is_tried_again_once_an_event_came(server_address, connect) -> None:
    server, address = server_address
    side = connect(address, retry=QUICK)
    server.breaks_after_start = True
    stream = side.client.stream_chat("Hello")
    assert isinstance((await side.read(stream, 1))[0], Started)
    with pytest.raises(UnavailableError, match="nobody is there"):
        await side.read(stream)
    with pytest.raises(UnavailableError, match="nobody is there"):
        await side.call("chat", "Hello")
    assert server.calls == 2


async def test_a_wait_that_outlasts_the_deadline_is_not_begun(server_address, connect) -> None:
    server, address = server_address
    side = connect(address, retry=RetryPolicy(first_wait=60, longest_wait=60))
    for call in CALLS:
        server.failures = [GONE]
        with pytest.raises(UnavailableError):
            await side.call(*call, timeout=5)


async def test_a_wait_ends_when_its_stream_is_closed(server_address, connect) -> None:
    server, address = server_address
    side = connect(address, timeout=None, retry=RetryPolicy(first_wait=60, longest_wait=60))
    server.failures = [GONE]
    stream = side.client.stream_chat("Hello")
    reading = asyncio.create_task(side.read(stream))
    async with asyncio.timeout(5):
        while server.calls == 0 or server.failures:
            await asyncio.sleep(0.005)
        stream.close()
        with pytest.raises(CancelledCallError, match="closed before its last event"):
            await reading
    assert server.calls == 1


async def test_a_wait_ends_when_its_client_is_closed(server_address, connect) -> None:
    server, address = server_address
    side = connect(address, timeout=None, retry=RetryPolicy(first_wait=60, longest_wait=60))
    server.failures = [GONE]
    asking = asyncio.create_task(side.call("models"))
    async with asyncio.timeout(5):
        while server.calls == 0 or server.failures:
            await asyncio.sleep(0.005)
        await side.close()
        with pytest.raises(CancelledCallError):
            await asking


async def test_a_method_that_an_older_server_lacks_is_not_served(server_address, connect) -> None:
    with pytest.raises(NotServedError):
        await connect(server_address[1]).call("model")


async def test_calls_and_streams_go_on_when_the_server_comes_back(start_backend, connect) -> None:
    patient = RetryPolicy(attempts=200, first_wait=0.02, growth=1)
    with tempfile.TemporaryDirectory(prefix="trivet-") as name:
        with start_backend(Path(name)) as backend:
            side = connect(backend.address, retry=patient)
            before = await side.call("chat", "Hello", SamplingParams(max_tokens=3))
        with pytest.raises(UnavailableError):
            await connect(backend.address, retry=RetryPolicy(attempts=1)).call("models")
        waiting = [asyncio.create_task(side.call("models")), asyncio.create_task(side.call("chat", "Hello", SamplingParams(max_tokens=3)))]
        with start_backend(Path(name)):
            models, answer = await asyncio.gather(*waiting)
    assert models
    assert answer.text == before.text


# ---- the rule alone ----


@dataclass
class Clock:
    now: float = 100.0
    drawn: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def draw(self, least: float, most: float) -> float:
        self.drawn.append((least, most))
        return most


def attempts(policy: RetryPolicy, timeout: float | None = None) -> tuple[Attempts, Clock]:
    clock = Clock()
    return Attempts(policy, timeout, clock=clock, draw=clock.draw), clock


def test_waits_grow_to_their_limit_and_are_drawn_from_the_upper_half() -> None:
    tries, clock = attempts(RetryPolicy(attempts=6, first_wait=1, growth=2, longest_wait=5))
    assert [tries.wait_after(GONE) for _ in range(6)] == [1, 2, 4, 5, 5, None]
    assert clock.drawn == [(0.5, 1), (1, 2), (2, 4), (2.5, 5), (2.5, 5)]


def test_a_thousand_attempts_wait_no_longer() -> None:
    tries, _ = attempts(RetryPolicy(attempts=10_000, first_wait=1, growth=10, longest_wait=5))
    assert [tries.wait_after(GONE) for _ in range(2000)][-1] == 5


def test_a_time_that_the_server_names_is_kept_unless_it_is_too_far() -> None:
    def asks(seconds: float) -> TrivetError:
        return TrivetError(ErrorKind.UNAVAILABLE, "later", retry_after_ms=int(seconds * 1000))

    policy = RetryPolicy(attempts=9, first_wait=1, growth=1, longest_retry_after=30)
    assert [attempts(policy)[0].wait_after(asks(seconds)) for seconds in (0, 0.5, 7, 30, 31)] == [1, 1, 7, 30, None]


def test_all_attempts_share_one_deadline() -> None:
    tries, clock = attempts(RetryPolicy(attempts=9, first_wait=1, growth=1), timeout=10)
    assert tries.remaining() == 10
    clock.now += 8.5
    assert tries.remaining() == 1.5
    assert tries.wait_after(GONE) == 1
    clock.now += 1
    assert tries.wait_after(GONE) is None
    clock.now += 9
    assert tries.remaining() == 0
    assert attempts(RetryPolicy())[0].remaining() is None


@pytest.mark.parametrize(
    "fields",
    [{"attempts": 0}, {"first_wait": -1}, {"longest_wait": float("inf")}, {"longest_retry_after": float("nan")}, {"growth": 0.5}],
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RetryPolicy(**fields)
    assert caught.value.param == next(iter(fields))
