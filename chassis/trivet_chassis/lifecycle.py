"""The life of a service process: start, serve until a signal, drain, leave with an honest exit code.

The first SIGTERM or SIGINT asks for a drain, the second ends the process at once. Exit codes: 0 clean, 1 a fault of ours,
2 a configuration that cannot work (one readable line, no traceback). A background task that dies ends the service: nothing runs half.
An exception that nobody awaits (a callback, a forgotten task) is logged as an error and the service goes on: it belongs to one request.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from trivet_proto.errors import TrivetError

from trivet_chassis.settings import explain

logger = logging.getLogger(__name__)

EXIT_CLEAN = 0
EXIT_FAULT = 1
EXIT_CONFIGURATION = 2

FAILURE_GRACE_S = 5.0
"""After a supervised task died, the main coroutine has so long to clean up before it is cancelled."""

CANCEL_GRACE_S = 5.0
"""What was cancelled has so long to end before the process leaves without it."""

_COMM = Path("/proc/self/comm")
_COMM_BYTES = 15


class Lifecycle:
    """What a service's main coroutine holds on to: the wish to drain, and the tasks that must not die."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    @property
    def failure(self) -> BaseException | None:
        """What the first supervised task to die died of."""
        return self._failure

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the service; if it raises, the service ends with exit code 1. Returning or being cancelled is no fault."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._notice_end)
        return task

    async def until_draining(self) -> None:
        """Return when a drain was asked for. Raises what a supervised task died of."""
        await self._first_of(self.draining, self._failed)
        if self._failure is not None:
            raise self._failure

    async def cancel_tasks(self) -> None:
        """End all supervised tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until_overdue(self, drain_limit_s: float | None) -> None:
        """Return, with a log line, when the main coroutine should long have ended: after a failure, or when a drain outlasts its limit."""
        if drain_limit_s is None:
            await self._failed.wait()
        else:
            await self._first_of(self.draining, self._failed)
        if self._failure is None and drain_limit_s is not None:
            try:
                async with asyncio.timeout(drain_limit_s):
                    await self._failed.wait()
            except TimeoutError:
                logger.error("the drain took longer than %g s: ending what still runs", drain_limit_s)
                return
        await asyncio.sleep(FAILURE_GRACE_S)

    async def _first_of(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _notice_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        failure = task.exception()
        if failure is None:
            return
        logger.error("the task %r died", task.get_name(), exc_info=failure)
        self._failure = self._failure or failure
        self._failed.set()


Main = Callable[[Lifecycle], Awaitable[None]]


def run_service(main: Main, *, name: str = "", drain_limit_s: float | None = None) -> int:
    """Run `main` on uvloop with signals handled; returns the exit code.

    `name` becomes the process' name in ps and top. With `drain_limit_s`, `main` is cancelled that long after the first signal: a backstop
    above the service's own drain limit. The line of a `TrivetError` goes to standard error: exit code 2 for a 4xx kind, 1 for a 5xx one.
    """
    if name:
        set_process_name(name)
    lifecycle = Lifecycle()
    # What the imports have made stays until the end. Walking over it, a full collection stops a frontend for 11 ms, a worker for 70.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_live(main, lifecycle, drain_limit_s))
    except asyncio.CancelledError:
        return EXIT_FAULT  # it was cancelled for being overdue, which has its log line
    except TrivetError as error:
        if error is lifecycle.failure or error.appearance.http_status >= 500:
            print(f"{name or 'the service'} ends: {error.message}", file=sys.stderr, flush=True)
            return EXIT_FAULT
        print(explain(error), file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    except Exception as error:
        if error is not lifecycle.failure:
            logger.critical("the service ends on an unexpected error", exc_info=True)
        return EXIT_FAULT
    return EXIT_CLEAN if lifecycle.failure is None else EXIT_FAULT


def set_process_name(name: str) -> None:
    """What ps, top and a debugger show for this process: the first 15 bytes of `name`. Without effect where /proc is missing."""
    try:
        _COMM.write_bytes(name.encode()[:_COMM_BYTES])
    except OSError as error:
        logger.debug("the process keeps its name: %s", error)


async def _live(main: Main, lifecycle: Lifecycle, drain_limit_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, lifecycle, number)
    work = asyncio.ensure_future(main(lifecycle))
    backstop = asyncio.create_task(_end_overdue(work, lifecycle, drain_limit_s), name="lifecycle backstop")
    try:
        await work
    finally:
        backstop.cancel()
        await _end_in_time(lifecycle.cancel_tasks())


async def _end_overdue(work: asyncio.Future[None], lifecycle: Lifecycle, drain_limit_s: float | None) -> None:
    await lifecycle.until_overdue(drain_limit_s)
    work.cancel()
    await asyncio.sleep(CANCEL_GRACE_S)
    _leave_at_once()


async def _end_in_time(ending: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(ending)
    _, late = await asyncio.wait([task], timeout=CANCEL_GRACE_S)
    if late:
        _leave_at_once()


def _leave_at_once() -> None:
    names = sorted(task.get_name() for task in asyncio.all_tasks())
    logger.critical("leaving by force: tasks did not end when they were cancelled (%s)", ", ".join(names))
    os._exit(EXIT_FAULT)


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("unhandled: %s", context.get("message", "an exception that nobody awaited"), exc_info=context.get("exception"))


def _on_signal(lifecycle: Lifecycle, number: int) -> None:
    if lifecycle.draining.is_set():
        logger.warning("second signal: leaving at once")
        os._exit(128 + number)
    logger.info("%s: draining; a second signal ends at once", signal.Signals(number).name)
    lifecycle.draining.set()
