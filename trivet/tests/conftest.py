"""A launch of fake services as a child process, with what a test asks of it, and an engine without a model in this one.

Leaving a launch checks that nothing is left.
"""

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from trivet.offline.engine import RunningEngine
from trivet_chassis.rpc import create_channel
from trivet_doubles.mock_scheduler import MockScheduler, MockSchedulerSettings

WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class FakeLaunch:
    folder: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def journal(self) -> list[str]:
        """`SERVICE EVENT` in the order of happening."""
        return [" ".join(line.split()[:2]) for line in self._lines()]

    def pids(self, service: str, event: str = "ready") -> list[int]:
        return [int(line.split()[2]) for line in self._lines() if line.startswith(f"{service} {event}")]

    def sockets(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]

    def processes(self) -> list[psutil.Process]:
        """All that carry this launch's folder in their environment or, as the guard does, in their command."""
        found = []
        for process in psutil.process_iter():
            try:
                marks = (process.environ().get("FAKE_LAUNCH"), *process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.folder) in (mark or "") for mark in marks):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WITHIN_S
        while not condition():
            assert loop.time() < deadline, f"not within {WITHIN_S:g} s: {what}\n{self.log()}"
            await asyncio.sleep(0.02)

    async def up(self) -> None:
        await self.until(lambda: (self.folder / "up").exists() or self.process.poll() is not None, "the launch is up")
        assert (self.folder / "up").exists(), self.log()

    async def ended(self) -> int:
        await self.until(lambda: self.process.poll() is not None, "the launch has ended")
        return int(self.process.returncode)

    async def left_nothing(self) -> None:
        await self.until(lambda: not self.processes(), "all processes are gone")
        await self.until(lambda: not list(self.folder.glob("trivet-*")), "the run directory is gone")
        assert not self.sockets()

    def _lines(self) -> list[str]:
        file = self.folder / "journal"
        return file.read_text().splitlines() if file.exists() else []


Launching = Callable[..., AbstractAsyncContextManager[FakeLaunch]]


@pytest.fixture
def launching() -> Launching:
    @asynccontextmanager
    async def launch(
        *,
        scheduler: tuple[str, ...] = (),
        worker: tuple[str, ...] = (),
        frontend: tuple[str, ...] = (),
        stop_within: float = 20.0,
        max_restarts: int = 5,
        startup_timeout: float = 30.0,
        terminal: int | None = None,
    ) -> AsyncIterator[FakeLaunch]:
        with tempfile.TemporaryDirectory(prefix="fake-launch-") as name:
            folder = Path(name)
            options = {
                "folder": name,
                "services": {"scheduler": scheduler, "worker": worker, "frontend": frontend},
                "stop_within": stop_within,
                "max_restarts": max_restarts,
                "startup_timeout": startup_timeout,
            }
            command = [sys.executable, str(Path(__file__).with_name("fake_launch.py")), json.dumps(options)]
            if terminal is not None:  # setsid --ctty: the terminal becomes the controlling one, so that its Ctrl-C is real
                command = ["setsid", "--ctty", "--wait", *command]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if terminal is None else terminal,
                    stdout=log if terminal is None else terminal,
                    stderr=log if terminal is None else terminal,
                    env=os.environ | {"FAKE_LAUNCH": name},
                    start_new_session=terminal is None,
                )
            started = FakeLaunch(folder, process)
            try:
                yield started
                await started.ended()
                await started.left_nothing()
            finally:
                for left in started.processes():
                    left.kill()
                process.wait()

    return launch


class Played:
    """An engine that dies when it is told to, of what it is told."""

    def __init__(self, folder: Path) -> None:
        self._address = f"unix:{folder}/played.sock"
        self._death: asyncio.Future[BaseException] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.gone = threading.Event()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[RunningEngine]:
        self._loop = asyncio.get_running_loop()
        self._death = self._loop.create_future()
        settings = MockSchedulerSettings(listen=self._address, synthetic=True, step_time=0.005)
        async with MockScheduler(settings):
            life = asyncio.create_task(self._live(self._death))
            try:
                yield RunningEngine(self._address, create_channel, life)
            finally:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
                self.gone.set()

    async def _live(self, death: asyncio.Future[BaseException]) -> NoReturn:
        raise await death

    def die(self, error: BaseException) -> None:
        assert self._loop is not None
        assert self._death is not None
        self._loop.call_soon_threadsafe(self._death.set_result, error)


@pytest.fixture
def played() -> Iterator[Played]:
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        yield Played(Path(folder))
