"""The mock scheduler as a service: health and metrics like a real one's, sessions, leave."""

import os
import signal

from prometheus_client import CollectorRegistry, Gauge
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import MetricsServer, create_registry

from trivet_doubles.mock_scheduler.config import MockSchedulerSettings
from trivet_doubles.mock_scheduler.life import Life
from trivet_doubles.mock_scheduler.scheduler import MockScheduler


async def serve(settings: MockSchedulerSettings, lifecycle: Lifecycle) -> None:
    """Until a drain is asked for and over."""
    scheduler = MockScheduler(settings, on_death=kill_this_process)
    page = MetricsServer(
        settings.metrics_listen,
        registry_of(scheduler.life),
        ready=lambda: settings.replicas > 0 and not scheduler.life.draining,
        progress=scheduler.life.progress,
    )
    await page.start()
    try:
        async with scheduler:
            await lifecycle.until_draining()
            await scheduler.drain(settings.drain_timeout)
    finally:
        await page.stop()


def registry_of(life: Life) -> CollectorRegistry:
    """Read off its counters when scraped."""
    registry = create_registry("mock_scheduler")
    for name, text, read in (
        ("trivet_streams", "Sessions that are open", lambda: life.sessions),
        ("trivet_sessions", "Frontends connected", lambda: life.sessions),
        ("vllm:num_requests_running", "Requests running", lambda: life.running),
        ("vllm:num_requests_waiting", "Requests waiting", lambda: life.waiting),
        ("trivet_mock_scheduler_outputs", "Messages of outputs so far", lambda: life.outputs),
        ("trivet_mock_scheduler_tokens", "Tokens given so far", lambda: life.tokens),
    ):
        Gauge(name, text, registry=registry).set_function(read)
    return registry


def kill_this_process() -> None:
    """What `die_after` means for a process: no word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)
