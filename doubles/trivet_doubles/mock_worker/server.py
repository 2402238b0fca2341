"""The mock worker as a service: health and metrics like a real worker's, attach, leave."""

import asyncio
import os
import signal

from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer
from trivet_chassis.rpc import RpcServer, create_server

from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.metrics import MockWorkerMetrics
from trivet_doubles.mock_worker.worker import MockWorker

DRAIN_S = 5.0  # for the scheduler to end the stream


async def serve(settings: MockWorkerSettings, lifecycle: Lifecycle) -> None:
    """Until a drain is asked for. Raises what the scheduler refuses this worker with."""
    worker = MockWorker(settings, on_death=kill_this_process)
    metrics, changed = MockWorkerMetrics(worker.life), asyncio.Event()
    worker.life.on_change = changed.set
    page = MetricsServer(settings.metrics_listen, metrics.registry, ready=lambda: worker.life.is_attached, progress=worker.life.progress)
    health = await create_server(settings.listen, register=lambda server: None, services=()) if settings.listen else None
    await page.start()
    if health is not None:
        await health.start()
        lifecycle.supervise(_show_health(worker, changed, health), "health")
    attachment = asyncio.create_task(worker.run(), name="attach to the scheduler")
    draining = asyncio.create_task(lifecycle.until_draining(), name="wait for the drain")
    try:
        await asyncio.wait({attachment, draining}, return_when=asyncio.FIRST_COMPLETED)
        if attachment.done():
            attachment.result()
        await draining
        worker.drain(int(DRAIN_S * 1000))
        await asyncio.wait({attachment}, timeout=DRAIN_S)
    finally:
        for task in (attachment, draining):
            task.cancel()
        await asyncio.gather(attachment, draining, return_exceptions=True)
        await page.stop()
        if health is not None:
            await health.stop()


def kill_this_process() -> None:
    """What `die_step` means for a process: no word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)


async def _show_health(worker: MockWorker, changed: asyncio.Event, health: RpcServer) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await health.health.ready(worker.life.is_attached)
