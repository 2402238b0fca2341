"""A measurement that started processes ends them when it is told to end, by SIGTERM as by an interrupt."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


def run_until_told(measurement: Coroutine[None, None, T]) -> T:
    """Its result, out of an event loop of its own. After SIGTERM what it opened is closed, and SystemExit is raised."""
    try:
        return uvloop.run(_cancelled_when_told(measurement))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _cancelled_when_told(measurement: Coroutine[None, None, T]) -> T:
    task = asyncio.ensure_future(measurement)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
