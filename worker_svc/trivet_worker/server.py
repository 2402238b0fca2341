"""The worker's life: load, attach, run steps, leave."""

import asyncio
import logging

from trivet_chassis.clock import SystemClock
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer
from trivet_chassis.rpc import RpcServer, create_server

from trivet_worker.config import WorkerSettings
from trivet_worker.link import SchedulerLink
from trivet_worker.loading import load_model
from trivet_worker.metrics import WorkerMetrics
from trivet_worker.step_thread import StepThread

logger = logging.getLogger(__name__)

DRAIN_S = 0.5  # for the word to reach the scheduler, which ends the stream


async def serve(settings: WorkerSettings, lifecycle: Lifecycle) -> None:
    """Until a drain is asked for. Raises what the scheduler refuses this worker with: a configuration to be mended, not to be retried."""
    metrics, health = WorkerMetrics(), None
    if settings.listen:
        health = await create_server(settings.listen, register=lambda server: None, services=())
        await health.start()
    thread = StepThread()
    model = await thread.call(lambda: load_model(settings))
    link = SchedulerLink(settings, model, thread, SystemClock())
    link.observe = metrics.observe
    changed = asyncio.Event()
    link.on_change = changed.set
    page = MetricsServer(settings.metrics_listen, metrics.registry, ready=lambda: link.is_attached)
    await page.start()
    # Not supervised: what is supervised and dies counts as a fault of ours, which a launcher answers with a restart.
    attachment = asyncio.create_task(link.run(), name="attach to the scheduler")
    draining = asyncio.create_task(lifecycle.until_draining(), name="wait for the drain")
    lifecycle.supervise(_show_health(link, changed, health, metrics), "health")
    try:
        await asyncio.wait({attachment, draining}, return_when=asyncio.FIRST_COMPLETED)
        if attachment.done():
            attachment.result()
        await draining
        link.say_draining()
        await asyncio.wait({attachment}, timeout=DRAIN_S)
    finally:
        thread.stop()
        for task in (attachment, draining):
            task.cancel()
        await asyncio.gather(attachment, draining, return_exceptions=True)
        await page.stop()
        if health is not None:
            await health.stop()


async def _show_health(link: SchedulerLink, changed: asyncio.Event, health: RpcServer | None, metrics: WorkerMetrics) -> None:
    """SERVING means: attached, so steps come and are run."""
    while True:
        await changed.wait()
        changed.clear()
        metrics.attached.set(link.is_attached)
        if health is not None:
            await (health.health.serving() if link.is_attached else health.health.not_serving())
