"""The services one by one, for tests that mix, lose or bring back single ones; `deployment.py` starts a whole suite instead.

A service is a child process of the test with a log of its own, in a folder that the test gives. Whoever starts one also ends it, with
SIGTERM, unless the test has killed it. Addresses are Unix sockets in the folder, but for the gateway's port.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trivet_chassis.rpc import is_serving

from tests.deployment import GONE_WITHIN, READY_WITHIN, eventually


@dataclass(frozen=True, slots=True)
class Service:
    """One running process; `log` is what it wrote."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> None:
        """SIGKILL: no word to anybody."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def terminate(self) -> None:
        """SIGTERM, and wait for the end; the exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(self.process.wait(), GONE_WITHIN)
        assert self.process.returncode == 0, f"{self.name} left with {self.process.returncode}:\n{self.log[-4000:]}"


@asynccontextmanager
async def running(module: str, *flags: str, folder: Path, name: str = "", python_path: str = "") -> AsyncIterator[Service]:
    """`python -m module flags`, under PYTHONPATH `python_path` when given; ended on leaving if it still lives."""
    name = name or module
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIVET_")}
    environment |= {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    if python_path:
        environment["PYTHONPATH"] = python_path
    log_file = folder / f"{name}.log"
    with log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *flags, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
        )
    service = Service(name, process, log_file)
    try:
        yield service
        if service.is_alive:
            await service.terminate()
    finally:
        if service.is_alive:
            process.kill()
            await process.wait()


async def until_serving(service: Service, address: str, *, health: str = "") -> None:
    """Wait until the health service at `address` says SERVING; fails at once when the process has ended."""

    async def looks_well() -> bool:
        assert service.is_alive, f"{service.name} ended:\n{service.log[-6000:]}"
        return await is_serving(address, service=health)

    await eventually(looks_well, within=READY_WITHIN, what=f"{service.name} is serving")
