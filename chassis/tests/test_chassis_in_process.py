"""Calls between stubs and servicers are the same over a socket and in one process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from trivet_chassis.in_process import AHEAD, InProcessServer
from trivet_chassis.rpc import Dial, create_channel, create_server, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2, types_pb2, worker_pb2
from trivet_proto.v1.engine_pb2_grpc import EngineServiceServicer, EngineServiceStub, add_EngineServiceServicer_to_server
from trivet_proto.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server


def drain(number: int) -> engine_pb2.SessionResponse:
    return engine_pb2.SessionResponse(draining=types_pb2.Draining(deadline_ms=number))


class Echo(EngineServiceServicer, WorkerServiceServicer):
    """Answers with the deadlines that it is told; 13 is refused, 7 is the last."""

    def __init__(self) -> None:
        self.written = 0
        self.left = asyncio.Event()

    async def Session(self, request_iterator: Any, context: Any) -> None:
        try:
            await context.send_initial_metadata(())
            async for request in request_iterator:
                number = request.draining.deadline_ms
                if number == 13:
                    raise TrivetError(ErrorKind.OVERLOADED, "thirteen is too many", param="deadline_ms", retry_after_ms=5)
                await context.write(drain(number))
                if number == 7:
                    return
        finally:
            self.left.set()

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.AttachResponse]:
        async for _ in request_iterator:
            for number in range(1000):
                self.written = number
                yield worker_pb2.AttachResponse(drain=worker_pb2.Drain(deadline_ms=number, reason="x" * 100_000))

    async def PutBundle(self, request_iterator: Any, context: Any) -> worker_pb2.PutBundleResponse:
        return worker_pb2.PutBundleResponse(sha256=b"".join([message.sha256 async for message in request_iterator]))

    async def GetModelBundle(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        for byte in request.sha256:
            yield engine_pb2.GetModelBundleResponse(chunk=types_pb2.Chunk(data=bytes([byte])))

    async def GetLoad(self, request: Any, context: Any) -> engine_pb2.GetLoadResponse:
        raise RuntimeError("nobody foresaw this")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture(params=["socket", "in process"])
async def dial(request: pytest.FixtureRequest, tmp_path: Path, echo: Echo) -> AsyncIterator[Dial]:
    def register(server: Any) -> None:
        add_EngineServiceServicer_to_server(echo, server)
        add_WorkerServiceServicer_to_server(echo, server)

    if request.param == "socket":
        served = await create_server(f"unix:{tmp_path}/echo.sock", register=register, services=())
        await served.start()
        yield lambda address: create_channel(f"unix:{tmp_path}/echo.sock")
        await served.stop()
    else:
        local = InProcessServer()
        register(local)
        yield local.dial
        await local.close()


def said(number: int) -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(draining=types_pb2.Draining(deadline_ms=number))


async def test_a_stream_goes_both_ways_until_the_handler_returns(dial: Dial) -> None:
    async with dial("") as channel:
        call: Any = EngineServiceStub(channel).Session()
        for number in (1, 2, 7):
            await call.write(said(number))
            answer = await call.read()
            assert answer == drain(number)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_what_a_handler_raises_reaches_the_caller_with_everything_it_says(dial: Dial) -> None:
    async with dial("") as channel:
        call: Any = EngineServiceStub(channel).Session()
        await call.write(said(13))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        error = error_of(failure.value)
        assert (error.kind, error.message, error.param, error.retry_after_ms) == (
            ErrorKind.OVERLOADED,
            "thirteen is too many",
            "deadline_ms",
            5,
        )
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(said(1))


async def test_what_nobody_foresaw_is_an_internal_error_that_keeps_its_words(dial: Dial, caplog: pytest.LogCaptureFixture) -> None:
    async with dial("") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest())
        error = error_of(failure.value)
    assert error.kind is ErrorKind.INTERNAL
    assert "foresaw" not in error.message
    assert "nobody foresaw this" in caplog.text


async def test_streams_of_one_direction_come_whole(dial: Dial) -> None:
    async def chunks() -> AsyncIterator[worker_pb2.PutBundleRequest]:
        for byte in b"abc":
            yield worker_pb2.PutBundleRequest(sha256=bytes([byte]))

    async with dial("") as channel:
        put = await WorkerServiceStub(channel).PutBundle(chunks())
        assert put.sha256 == b"abc"
        answers = EngineServiceStub(channel).GetModelBundle(engine_pb2.GetModelBundleRequest(sha256=b"xyz"), timeout=60)
        assert b"".join([answer.chunk.data async for answer in answers]) == b"xyz"


async def test_leaving_the_channel_ends_the_handler(dial: Dial, echo: Echo) -> None:
    async with dial("") as channel:
        call: Any = EngineServiceStub(channel).Session()
        await call.write(said(1))
        await call.read()
    await asyncio.wait_for(echo.left.wait(), 10)


async def test_a_call_that_is_given_up_at_once_ends(dial: Dial) -> None:
    async with dial("") as channel:
        call: Any = EngineServiceStub(channel).Session()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call.read()


async def test_a_writer_waits_for_a_slow_reader(dial: Dial, echo: Echo) -> None:
    async def one() -> AsyncIterator[worker_pb2.AttachRequest]:
        yield worker_pb2.AttachRequest(heartbeat=types_pb2.Heartbeat())

    async with dial("") as channel:
        answers = aiter(WorkerServiceStub(channel).Attach(one()))
        for _ in range(3):
            await anext(answers)
        for _ in range(100):
            await asyncio.sleep(0)
        assert echo.written < 3 + 10 * AHEAD
