"""The worker's life: load, attach, run steps, leave.

Live from the first moment, ready while attached: loading takes long, and whoever watches must be able to tell it from being stuck.
"""

import asyncio
import logging

from trivet_chassis.clock import SystemClock
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer
from trivet_chassis.resolving import Peers
from trivet_chassis.rpc import RpcServer, create_server
from trivet_kernels.pages import give_large_blocks_back

from trivet_worker.config import WorkerSettings
from trivet_worker.link import SchedulerLink
from trivet_worker.link.home import Home
from trivet_worker.loading import LoadedModel, load_model, memory_available
from trivet_worker.metrics import WorkerMetrics
from trivet_worker.step_thread import StepThread

logger = logging.getLogger(__name__)

GOODBYE_S = 0.5  # beside the drain's own limit, for the word to reach the scheduler, which ends the stream


async def serve(settings: WorkerSettings, lifecycle: Lifecycle) -> None:
    """Until a drain is asked for and over. Raises what the scheduler refuses this worker with: to be mended, not to be retried."""
    worker = _Worker(settings)
    await worker.listen()
    draining = asyncio.create_task(lifecycle.until_draining(), name="wait for the drain")
    try:
        model = await _first(asyncio.create_task(worker.thread.call(lambda: load_model(settings)), name="load the model"), draining)
        if model is None:
            return
        if model.runner.is_whole_step:
            give_large_blocks_back()
        link = worker.link_of(model)
        lifecycle.supervise(worker.show_health(), "health")
        # Not supervised: what is supervised and dies counts as a fault of ours, which a launcher answers with a restart.
        attachment = asyncio.create_task(link.run(), name="attach to the scheduler")
        try:
            await asyncio.wait({attachment, draining}, return_when=asyncio.FIRST_COMPLETED)
            if attachment.done():
                attachment.result()
            await draining
            link.say_draining(settings.drain_timeout)
            await asyncio.wait({attachment}, timeout=settings.drain_timeout + GOODBYE_S)
        finally:
            worker.thread.stop()
            attachment.cancel()
            await asyncio.gather(attachment, return_exceptions=True)
    finally:
        worker.thread.stop()
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await worker.close()


async def _first(work: "asyncio.Task[LoadedModel]", draining: "asyncio.Task[None]") -> LoadedModel | None:
    """The result of `work`, or None when the process is to leave before that; the thread isn't waited for."""
    await asyncio.wait({work, draining}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return work.result()
    work.cancel()
    await draining
    return None


class _Worker:
    """What the process has beside the model: its addresses, its thread, and what they tell of it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._metrics = WorkerMetrics()
        self._rpc: RpcServer | None = None
        self._link: SchedulerLink | None = None
        self._model: LoadedModel | None = None
        self._changed = asyncio.Event()
        self.thread = StepThread()
        self._page = MetricsServer(
            settings.metrics_listen,
            self._metrics.registry,
            ready=lambda: self._is_attached,
            progress=self._progress,
            step_limit_s=settings.step_limit,
            refresh=self._refresh,
        )

    async def listen(self) -> None:
        if self._settings.listen:
            self._rpc = await create_server(self._settings.listen, register=lambda server: None, services=())
            await self._rpc.start()
        await self._page.start()

    async def close(self) -> None:
        await self._page.stop()
        if self._rpc is not None:
            await self._rpc.stop()

    def link_of(self, model: LoadedModel) -> SchedulerLink:
        settings, clock = self._settings, SystemClock()
        home = Home(Peers(settings.scheduler, name="scheduler"), clock, settings.rehome_after)
        link = SchedulerLink(settings, model, self.thread, clock, home)
        link.observe = self._metrics.observe
        link.on_change = self._changed.set
        self._link, self._model = link, model
        return link

    async def show_health(self) -> None:
        """Ready means: attached, so steps come and are run."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._metrics.attached.set(self._is_attached)
            if self._rpc is not None:
                await self._rpc.health.ready(self._is_attached)

    @property
    def _is_attached(self) -> bool:
        return self._link is not None and self._link.is_attached

    def _progress(self) -> tuple[bool, float | None]:
        age = None if self._link is None else self._link.running_step_age_s
        return age is not None, age

    def _refresh(self) -> None:
        self._metrics.memory_available.set(memory_available())
        if self._link is not None and self._model is not None:
            self._metrics.streams.set(self._link.num_streams)
            self._metrics.kv_cache_bytes.set(self._model.runner.kv_cache_bytes)
