"""The compute thread: runs what it is given, one after the other, and hands each result back to the event loop.

Compute never runs on the event loop, so heartbeats go on while a long step computes. The interpreter lock is free during the operators.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class StepThread:
    """One thread, a queue in, callbacks out."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="trivet-compute", daemon=True)
        self._thread.start()
        self._is_stopped = False

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `work` in turn; `then` gets its result on the event loop. `work` must not raise."""
        self.submit_series(lambda: (work(),), then)

    def submit_series(self, work: Callable[[], Iterable[T]], then: Callable[[T], None]) -> None:
        """The same for work with several results: `then` gets each as it comes."""

        def run() -> None:
            for result in work():
                self._hand_over(partial(then, result))

        self._work.put(run)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in turn and wait for it; what it raises is raised here. Cancelled when the thread has been stopped."""
        if self._is_stopped:
            raise asyncio.CancelledError("the compute thread has been stopped")
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                failure = error  # the name `error` ends with this block
                self._hand_over(lambda: _set_error(future, failure))
            else:
                self._hand_over(lambda: _set_result(future, result))

        self._work.put(run)
        return await future

    def stop(self) -> None:
        """After what is queued now."""
        self._is_stopped = True
        self._work.put(None)

    def join(self) -> None:
        """Wait, without the event loop, until the thread has ended; it must have been stopped."""
        self._thread.join()

    def _hand_over(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process leaves, nobody waits
            self._loop.call_soon_threadsafe(callback)

    def _live(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
