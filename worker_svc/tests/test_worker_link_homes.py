"""A worker that knows several schedulers, over real streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from trivet_chassis.clock import SystemClock
from trivet_chassis.resolving import Peers
from trivet_chassis.rpc import create_server
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, worker_pb2, worker_pb2_grpc
from trivet_worker.link import SchedulerLink
from trivet_worker.link.home import Home
from trivet_worker.step_thread import StepThread


class Loads(engine_pb2_grpc.EngineServiceServicer):
    """Says how many replicas there are."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    async def GetLoad(self, request: object, context: object) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=engine_pb2.Load(replicas_ready=self._replicas))


@pytest.fixture
async def two(driver, tools, tmp_path, llama_folder) -> AsyncIterator[list]:
    """Two schedulers, of which the first has fewer replicas, and a worker that knows both and waits for none."""
    schedulers, addresses = [], [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    async with AsyncExitStack() as stack:
        for replicas, address in enumerate(addresses):
            scheduler = tools.FakeScheduler(tools.cache_config(driver.loaded, 64))

            def register(server, scheduler=scheduler, replicas=replicas) -> None:
                worker_pb2_grpc.add_WorkerServiceServicer_to_server(scheduler, server)
                engine_pb2_grpc.add_EngineServiceServicer_to_server(Loads(replicas), server)

            scheduler.server = await create_server(address, register=register, services=())
            await scheduler.server.start()
            stack.push_async_callback(scheduler.server.stop, 0)
            schedulers.append(scheduler)
        thread, clock = StepThread(), SystemClock()
        settings = tools.settings_for(llama_folder, scheduler=tuple(addresses), name="replica-a", rehome_after=1.0)
        link = SchedulerLink(settings, driver.loaded, thread, clock, Home(Peers(addresses), clock, settings.rehome_after))
        task = asyncio.create_task(link.run())
        yield schedulers
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        thread.stop()


async def test_a_home_that_is_gone_for_long_is_left_for_another(two) -> None:
    first, second = two
    await (await first.next_stream()).next("ready")
    await first.server.stop(0)
    await (await second.next_stream()).next("ready")


async def test_a_home_that_says_it_leaves_is_left_at_once(two) -> None:
    first, second = two
    stream = await first.next_stream()
    await stream.next("ready")
    stream.down.put_nowait(worker_pb2.AttachResponse(drain=worker_pb2.Drain(deadline_ms=1000, reason="an upgrade")))
    stream.down.put_nowait(None)
    await (await second.next_stream()).next("ready")
    assert first.streams.empty()


async def test_a_home_that_is_back_in_time_is_kept(two) -> None:
    first, second = two
    stream = await first.next_stream()
    await stream.next("ready")
    stream.down.put_nowait(None)
    await (await first.next_stream()).next("ready")
    assert second.streams.empty()
