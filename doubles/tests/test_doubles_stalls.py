"""A stalled mock worker, seen from a scheduler that is played here: heartbeats go on, unless it is told to be silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from real_scheduler import worker_settings
from trivet_chassis.rpc import create_server
from trivet_doubles.mock_worker import Faults, MockWorker, attachment
from trivet_doubles.model import DoubleModel
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc

EPOCH = types_pb2.Epoch(instance=bytes(16), counter=1)


class PlayedScheduler(worker_pb2_grpc.WorkerServiceServicer):
    """Configures the worker, sends two steps without requests and keeps what comes up."""

    def __init__(self) -> None:
        self.came: list[worker_pb2.AttachRequest] = []
        self.answered = asyncio.Event()

    async def Attach(self, requests: AsyncIterator[worker_pb2.AttachRequest], context: object) -> AsyncIterator[worker_pb2.AttachResponse]:
        hello = (await anext(aiter(requests))).hello
        layers = hello.ranks[0].layers
        config = types_pb2.KvCacheConfig(num_blocks=8, groups=[types_pb2.KvCacheGroup(layers=["layer.0"], spec=layers[0].spec)])
        yield worker_pb2.AttachResponse(configure=worker_pb2.Configure(epoch=EPOCH, ranks=[config], steps_in_flight=2))
        for number in (1, 2):
            yield worker_pb2.AttachResponse(step=worker_pb2.Step(epoch=EPOCH, step=number))
        async for request in requests:
            self.came.append(request)
            if request.WhichOneof("message") == "result" and request.result.step == 2:
                self.answered.set()


@asynccontextmanager
async def playing(folder: Path) -> AsyncIterator[tuple[PlayedScheduler, str]]:
    scheduler, address = PlayedScheduler(), f"unix:{folder}/s.sock"

    def register(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(scheduler, server)

    server = await create_server(address, register=register, services=())
    await server.start()
    try:
        yield scheduler, address
    finally:
        await server.stop(0)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_stall_has_heartbeats_unless_it_is_silent(
    socket_folder: Path, model: DoubleModel, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(attachment, "HEARTBEAT_S", 0.05)
    faults = Faults(stall_step={1}, stall_for=0.4, silent=silent)
    async with playing(socket_folder) as (scheduler, address), MockWorker(worker_settings(address), faults, model=model):
        await asyncio.wait_for(scheduler.answered.wait(), 10)
    kinds = [request.WhichOneof("message") for request in scheduler.came]
    assert [kind for kind in kinds if kind != "heartbeat"] == ["ready", "result", "result"]
    stalled = [request.heartbeat for request in scheduler.came[1 : kinds.index("result")]]
    assert bool(stalled) is not silent
    assert all(beat.running_step == 1 and beat.last_step_received == 2 for beat in stalled)


async def test_a_modelled_time_is_spent_and_reported(socket_folder: Path, model: DoubleModel) -> None:
    async with playing(socket_folder) as (scheduler, address), MockWorker(worker_settings(address, step_time=0.05), model=model):
        await asyncio.wait_for(scheduler.answered.wait(), 10)
    times = [request.result.timing.total_us for request in scheduler.came if request.HasField("result")]
    assert min(times) >= 40_000
    assert worker_settings("", step_time=1, token_time=0.5, request_time=2).modelled_seconds(3, 4) == 9
