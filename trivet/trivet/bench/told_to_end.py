"""A measurement that is told to end does so: processes that it started are ended, by SIGTERM as by an interrupt, and native code that
knows no interrupts is not waited for."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
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


def interruptible(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread of its own, which ends with the process: an interrupt is raised here at once."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="measurement", daemon=True).start()
    return outcome.result()
