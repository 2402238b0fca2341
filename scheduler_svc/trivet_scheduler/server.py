"""The scheduler's life: bind, serve, drain, leave."""

import logging

from trivet_chassis.clock import SystemClock
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer
from trivet_chassis.rpc import create_server
from trivet_proto.v1 import engine_pb2_grpc, worker_pb2_grpc

from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.metrics import engine_registry
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
    metrics = MetricsServer(settings.metrics_listen, engine_registry(engine), ready=lambda: engine.is_ready)
    await metrics.start()
    await server.start()
    # Serving means that sessions and workers are accepted; whether a model is there is said in each load report.
    await server.health.serving()
    lifecycle.supervise(engine.expire_forever(), "expire requests")
    logger.info("listening on %s", server.address)
    try:
        await lifecycle.until_draining()
        engine.draining = True
        await server.health.not_serving()
        frontends.announce_draining(int(settings.drain_timeout * 1000))
        workers.announce_draining(int(settings.drain_timeout * 1000))
        if not await engine.until_idle(settings.drain_timeout):
            logger.warning("%d requests are not finished; they end with the scheduler", len(engine.core.requests))
    finally:
        await server.stop()
        await metrics.stop()
