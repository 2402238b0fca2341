"""The scheduler's life: bind, serve, drain, leave."""

import asyncio
import logging

from trivet_chassis.clock import SystemClock
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer
from trivet_chassis.rpc import Health, create_server
from trivet_proto.v1 import engine_pb2_grpc, worker_pb2_grpc

from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.metrics import engine_registry
from trivet_scheduler.report import step_progress
from trivet_scheduler.rpc.engine_service import EngineService
from trivet_scheduler.rpc.worker_service import WorkerService

logger = logging.getLogger(__name__)

SERVICES = ("trivet.v1.EngineService", "trivet.v1.WorkerService")


async def serve(settings: SchedulerSettings, lifecycle: Lifecycle) -> None:
    """Until a drain is asked for and over."""
    engine = Engine(settings, SystemClock())
    frontends = EngineService(engine, settings.name)
    workers = WorkerService(engine, default_registry(), settings.name)

    def register(server: object) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(frontends, server)  # type: ignore[arg-type]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server)  # type: ignore[arg-type]

    server = await create_server(settings.listen, register=register, services=SERVICES)
    registry = engine_registry(engine, lambda: len(frontends.streams) + len(workers.streams))
    metrics = MetricsServer(
        settings.metrics_listen,
        registry,
        ready=lambda: engine.is_ready,
        progress=lambda: step_progress(engine),
        step_limit_s=settings.step_timeout,
    )
    await metrics.start()
    await server.start()
    lifecycle.supervise(engine.expire_forever(), "expire requests")
    lifecycle.supervise(_show_readiness(engine, server.health), "readiness")
    logger.info("listening on %s", server.address)
    try:
        await lifecycle.until_draining()
        await _drain(engine, frontends, workers, settings.drain_timeout)
    finally:
        await server.stop()
        await metrics.stop()


async def _drain(engine: Engine, frontends: EngineService, workers: WorkerService, timeout_s: float) -> None:
    """What waits goes back at once, what runs at the deadline; then the sessions end, each with all that was to be said."""
    frontends.announce_draining(int(timeout_s * 1000))
    workers.announce_draining(int(timeout_s * 1000))
    engine.begin_draining()
    try:
        async with asyncio.timeout(timeout_s):
            await engine.until(lambda: not engine.core.requests)
    except TimeoutError:
        logger.warning("%d requests are not finished: they are handed back", engine.hand_back())
    await frontends.end_sessions()
    await workers.end_attachments()


async def _show_readiness(engine: Engine, health: Health) -> None:
    """Ready is: a worker is, and nobody is leaving."""
    changed = asyncio.Event()
    engine.on_ready_change = changed.set
    while True:
        await health.ready(engine.is_ready)
        await changed.wait()
        changed.clear()
