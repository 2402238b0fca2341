"""The life of a service process: start, serve until a signal, drain, leave with an honest exit code.

The first SIGTERM or SIGINT asks for a drain, the second ends the process at once. Exit codes: 0 clean, 1 a fault of ours,
2 a configuration that cannot work (one readable line, no traceback). A background task that dies ends the service: nothing runs half.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop
from trivet_proto.errors import TrivetError

from trivet_chassis.settings import explain

logger = logging.getLogger(__name__)

EXIT_CLEAN = 0
EXIT_FAULT = 1
EXIT_CONFIGURATION = 2


class Lifecycle:
    """What a service's main coroutine holds on to: the wish to drain, and the tasks that must not die."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the service; if it raises, the service ends with exit code 1."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._notice_end)
        return task

    async def until_draining(self) -> None:
        """Return when a drain was asked for. Raises what a supervised task died of."""
        waits = [asyncio.create_task(self.draining.wait()), asyncio.create_task(self._failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._failure is not None:
            raise self._failure

    async def cancel_tasks(self) -> None:
        """End all supervised tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _notice_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        logger.error("the task %r died", task.get_name(), exc_info=task.exception())
        self._failure = self._failure or task.exception()
        self._failed.set()


Main = Callable[[Lifecycle], Awaitable[None]]


def run_service(main: Main) -> int:
    """Run `main` on uvloop with signals handled; returns the exit code."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_live(main))
    except TrivetError as error:
        print(explain(error), file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    except Exception:
        logger.critical("the service ends on an unexpected error", exc_info=True)
        return EXIT_FAULT
    return EXIT_CLEAN


async def _live(main: Main) -> None:
    lifecycle = Lifecycle()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, lifecycle, number)
    try:
        await main(lifecycle)
    finally:
        await lifecycle.cancel_tasks()


def _on_signal(lifecycle: Lifecycle, number: int) -> None:
    if lifecycle.draining.is_set():
        logger.warning("second signal: leaving at once")
        os._exit(128 + number)
    logger.info("%s: draining; a second signal ends at once", signal.Signals(number).name)
    lifecycle.draining.set()
