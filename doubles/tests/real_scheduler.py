"""The real scheduler, in this process and on a Unix socket, and mock workers small enough that their pools run out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trivet_chassis.lifecycle import Lifecycle
from trivet_doubles.mock_worker import MockWorkerSettings
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.server import serve


@asynccontextmanager
async def running_scheduler(address: str, **settings: object) -> AsyncIterator[str]:
    lifecycle = Lifecycle()
    chosen = SchedulerSettings(listen=address, metrics_listen="", drain_timeout=0, **settings)
    serving = asyncio.create_task(serve(chosen, lifecycle))
    try:
        yield address
    finally:
        lifecycle.draining.set()
        await serving
        await lifecycle.cancel_tasks()


def worker_settings(scheduler: str, **settings: object) -> MockWorkerSettings:
    small = {"synthetic": True, "block_size": 4, "num_kv_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return MockWorkerSettings(**{"scheduler": scheduler, "name": "mock", **small, **settings})
