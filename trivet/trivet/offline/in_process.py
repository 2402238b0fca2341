"""The engine in this process: the services' own scheduler, link and runner, joined without sockets. Importing this brings in torch.

The event loop of whoever opens it has the scheduler and the worker's end of the link, a thread of its own computes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from trivet_chassis.clock import SystemClock
from trivet_chassis.in_process import InProcessServer
from trivet_chassis.resolving import Peers
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from trivet_proto.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.rpc.engine_service import EngineService
from trivet_scheduler.rpc.worker_service import WorkerService
from trivet_worker.link import SchedulerLink
from trivet_worker.link.home import Home
from trivet_worker.loading import load_model
from trivet_worker.step_thread import StepThread

from trivet.offline.engine import RunningEngine, StepTimes
from trivet.offline.settings import InProcessPlan


@asynccontextmanager
async def open_in_process(plan: InProcessPlan) -> AsyncIterator[RunningEngine]:
    clock, server, thread = SystemClock(), InProcessServer(), StepThread()
    engine = Engine(plan.scheduler, clock)
    add_EngineServiceServicer_to_server(EngineService(engine, plan.scheduler.name), server)  # type: ignore[arg-type]
    add_WorkerServiceServicer_to_server(WorkerService(engine, default_registry(), plan.scheduler.name), server)  # type: ignore[arg-type]
    life: asyncio.Task[NoReturn] | None = None
    try:
        model = await thread.call(lambda: load_model(plan.worker))
        home = Home(Peers(plan.worker.scheduler, name="scheduler"), clock, plan.worker.rehome_after)
        link = SchedulerLink(plan.worker, model, thread, clock, home, dial=server.dial)
        step_times = StepTimes()
        link.observe = step_times.take
        life = asyncio.create_task(_live(engine, link), name="run the engine")
        yield RunningEngine(plan.address, server.dial, life, step_times)
    finally:
        engine.begin_draining()
        if life is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        await server.close()
        thread.stop()
        if life is not None:  # else it may still be loading, for which nobody waits
            thread.join()


async def _live(engine: Engine, link: SchedulerLink) -> NoReturn:
    """Raises what the scheduler refuses the worker with."""
    tasks = [asyncio.create_task(link.run(), name="attach"), asyncio.create_task(engine.expire_forever(), name="expire requests")]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise TrivetError(ErrorKind.INTERNAL, "the engine has ended by itself")
