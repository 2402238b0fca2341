"""The engine as child processes, started, looked after and stopped as `trivet serve` does it, without signals: those are the caller's."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn

from rich.console import Console
from trivet_chassis.clock import SystemClock
from trivet_chassis.lifecycle import EXIT_CONFIGURATION
from trivet_chassis.rpc import create_channel
from trivet_proto.errors import ErrorKind, TrivetError

from trivet.launch.guard import Guard
from trivet.launch.planning import plan_engine
from trivet.launch.progress import Progress, TerminalProgress
from trivet.launch.restarts import RestartPolicy
from trivet.launch.run_directory import create_run_directory
from trivet.launch.settings import LoadedServeSettings
from trivet.launch.supervisor import LaunchFailed, Supervisor
from trivet.offline.engine import RunningEngine


@asynccontextmanager
async def open_children(settings: LoadedServeSettings, environ: Mapping[str, str], *, shows_start: bool) -> AsyncIterator[RunningEngine]:
    """`shows_start`: on a terminal, with a row for each process."""
    up = asyncio.Event()

    async def when_ready() -> None:
        up.set()

    with create_run_directory(environ) as run_directory:
        plan = plan_engine(settings, environ, run_directory, log_format="text")
        with Guard(run_directory) as guard:
            supervisor = Supervisor(
                plan.processes,
                guard=guard,
                progress=_progress(shows_start=shows_start),
                policy=RestartPolicy(SystemClock(), limit=settings.value.max_restarts),
                startup_timeout_s=settings.value.startup_timeout,
                when_ready=when_ready,
            )
            life = asyncio.create_task(_supervised(supervisor), name="supervise the engine")
            try:
                await _until(up, life)
                yield RunningEngine(plan.scheduler_address, create_channel, life)
            finally:
                supervisor.stop()
                await asyncio.gather(life, return_exceptions=True)


async def _supervised(supervisor: Supervisor) -> NoReturn:
    try:
        await supervisor.run()
    except LaunchFailed as failure:
        is_refused = failure.exit_code == EXIT_CONFIGURATION
        raise TrivetError(ErrorKind.INVALID_ARGUMENT if is_refused else ErrorKind.UNAVAILABLE, failure.message) from None
    raise TrivetError(ErrorKind.UNAVAILABLE, "the engine has been stopped")


async def _until(up: asyncio.Event, life: "asyncio.Task[NoReturn]") -> None:
    waiting = asyncio.create_task(up.wait())
    try:
        await asyncio.wait({waiting, life}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def _progress(*, shows_start: bool) -> Progress:
    console = Console(stderr=True)
    return TerminalProgress(console) if shows_start and console.is_terminal else _LogLines()


class _LogLines:
    """Nothing but what the services log, to whatever standard error is: a notebook's has no bytes underneath."""

    def begin(self) -> None:
        pass

    def starting(self, service: str) -> None:
        pass

    def ready(self, service: str) -> None:
        pass

    def log(self, service: str, line: bytes) -> None:
        if sys.stderr is not None:
            print(line.decode(errors="replace").rstrip("\r\n"), file=sys.stderr, flush=True)

    def end(self) -> None:
        pass
