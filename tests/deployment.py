"""A real deployment for the tests that cross services: `trivet serve` as a child process, with its three services.

It owns the process, the folder that the services put their sockets in, and the port. Leaving it is part of what is tested: an interrupt
as from a terminal must end all processes with exit code 0 and leave no socket behind. It doesn't talk to the services beyond asking
whether they are ready; `gateway.py` does.
"""

import asyncio
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

READY_WITHIN = 120.0
"""Seconds for a start; most of it is importing torch and preparing weights on a machine that is busy."""

GONE_WITHIN = 30.0
POLL_EVERY = 0.05


async def eventually(look: Callable[[], Awaitable[T | None]], *, within: float, what: str) -> T:
    """The first true value that `look` gives, asked again and again; an assertion error after `within` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while True:
        value = await look()
        if value:
            return value
        assert loop.time() < deadline, f"not within {within:g} s: {what}"
        await asyncio.sleep(POLL_EVERY)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Deployment:
    """Three running services; `folder` is theirs alone, which also marks their processes."""

    base_url: str
    folder: Path
    process: asyncio.subprocess.Process

    @property
    def grpc_address(self) -> str:
        """The public gRPC API: the launcher's own socket, unless flags said otherwise."""
        [path] = self.folder.rglob("frontend.sock")
        return f"unix:{path}"

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every process that was started with this deployment's folder in its environment, children of children included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def process_of(self, service: str) -> psutil.Process:
        """The one process of a service, as `python -m` started it."""
        found = [process for process in self.processes() if f"trivet_{service}" in process.cmdline()]
        assert len(found) == 1, f"{len(found)} processes of {service}"
        return found[0]

    def sockets(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]

    async def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: the whole foreground process group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)
        await asyncio.wait_for(self.process.wait(), GONE_WITHIN)

    async def until_ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.base_url, timeout=5) as client:

            async def is_ready() -> bool:
                assert self.process.returncode is None, f"the deployment ended while starting:\n{self.log()[-6000:]}"
                try:
                    return (await client.get("/health/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            try:
                await eventually(is_ready, within=READY_WITHIN, what="the deployment is ready")
            except AssertionError as late:
                raise AssertionError(f"{late}\n{self.log()[-6000:]}") from late


@asynccontextmanager
async def deployed(
    *flags: str, model: Path | None = None, dtype: str = "float32", variables: Mapping[str, str] | None = None
) -> AsyncIterator[Deployment]:
    """`trivet serve` with `flags` and environment `variables` on a free port, of the default model unless another one is named."""
    port = free_port()
    named = () if model is None else (str(model),)
    command = (sys.executable, "-m", "trivet", "serve", *named, "--port", str(port), "--dtype", dtype, *flags)
    async with launched(command, port=port, variables=variables) as deployment:
        yield deployment


@asynccontextmanager
async def launched(
    command: Sequence[str], *, port: int, exit_codes: Sequence[int] = (0,), variables: Mapping[str, str] | None = None
) -> AsyncIterator[Deployment]:
    """`command`, which serves on `port`, until it is ready; on leaving it is interrupted and must be gone without a trace."""
    with tempfile.TemporaryDirectory(prefix="trivet-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRIVET_", "MAKE"))}
        environment |= {"TMPDIR": name, "XDG_RUNTIME_DIR": name, "PORT": str(port), **(variables or {})}
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
            )
        deployment = Deployment(f"http://127.0.0.1:{port}", folder, process)
        try:
            await deployment.until_ready()
            yield deployment
            if process.returncode is None:
                await deployment.interrupt()
            assert process.returncode in exit_codes, f"exit code {process.returncode}:\n{deployment.log()[-6000:]}"
            assert not deployment.processes(), "processes were left behind"
            assert not deployment.sockets(), "socket files were left behind"
        finally:
            for left in deployment.processes():
                left.kill()
            await process.wait()
