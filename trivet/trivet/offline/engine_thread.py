"""The thread in which an engine and its frontend live, with an event loop of their own, behind calls that block their caller.

Owns the thread. The loop ends with the engine: when told to, or when the engine has died, which every later call then says.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import uvloop
from trivet_frontend.config import FrontendSettings
from trivet_frontend.offline import OfflineFrontend
from trivet_frontend.serving import Inference
from trivet_proto.errors import ErrorKind, TrivetError

from trivet.offline.engine import OpenEngine, RunningEngine, StepTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")

SettingsAt = Callable[[str], FrontendSettings]
"""The frontend's settings for a scheduler at an address."""


class EngineThread:
    """Started once, stopped once. `step_times` is filled while it runs, None where the worker is in another process."""

    NAME = "trivet-engine"

    def __init__(self, open_engine: OpenEngine, settings_at: SettingsAt) -> None:
        self._open_engine = open_engine
        self._settings_at = settings_at
        self._up: concurrent.futures.Future[Inference] = concurrent.futures.Future()
        self._failure = TrivetError(ErrorKind.FAILED_PRECONDITION, "this LLM has been closed")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self.step_times: StepTimes | None = None
        self._is_told_to_stop, self._has_died = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.NAME, daemon=True)

    def start(self) -> None:
        """Return when the engine serves. Raises what it could not start for; then nothing is left of it."""
        self._thread.start()
        try:
            self._up.result()
        except BaseException:
            self.stop()
            raise

    def submit(self, work: Callable[[Inference], Coroutine[Any, Any, T]]) -> "concurrent.futures.Future[T]":
        """Begin `work` there. Raises what the engine has ended for."""
        inference = self._up.result()
        if self._loop is None or self._is_told_to_stop.is_set():
            raise self._failure
        running = work(inference)
        try:
            return asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError:  # the loop has just closed
            running.close()
            raise self._failure from None

    @property
    def is_ending(self) -> bool:
        """Told to end, or dead: what is unanswered now stays so, for the reason of `why_it_ended`."""
        return self._is_told_to_stop.is_set() or self._has_died.is_set()

    def why_it_ended(self) -> TrivetError:
        return self._failure

    def stop(self) -> None:
        """End what runs and wait until nothing is left. A second call does nothing."""
        self._is_told_to_stop.set()
        loop, main = self._loop, self._main
        if loop is not None and main is not None:
            with suppress(RuntimeError):  # it has closed
                loop.call_soon_threadsafe(main.cancel)
        # The garbage collector may call this on the very thread.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:
            self._give_up(self._failure)
        except BaseException as error:
            self._give_up(error)
        finally:
            self._loop = None

    async def _live(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        if self._is_told_to_stop.is_set():
            return
        async with self._open_engine() as engine, OfflineFrontend(self._settings_at(engine.address), dial=engine.dial) as frontend:
            await _unless_dead(engine, frontend.until_ready())
            self.step_times = engine.step_times
            self._up.set_result(frontend.inference)
            try:
                await asyncio.shield(engine.life)
            except Exception as error:
                self._give_up(error)  # at once: whoever stops us now must not hide it

    def _give_up(self, error: BaseException) -> None:
        """The start's fault if it has not come to its end, else that of every later call."""
        if not self._up.done():
            self._up.set_exception(error)
        elif isinstance(error, TrivetError):
            self._failure = error.with_traceback(None)
            self._has_died.set()
        elif error is not self._failure:
            logger.error("the engine has broken", exc_info=error)
            self._failure = TrivetError(ErrorKind.INTERNAL, f"the engine has broken: {error!r}")
            self._has_died.set()


async def _unless_dead(engine: RunningEngine, work: Coroutine[Any, Any, None]) -> None:
    """Raises what the engine died of if that comes first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, engine.life}, return_when=asyncio.FIRST_COMPLETED)
        (engine.life if engine.life.done() else task).result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
