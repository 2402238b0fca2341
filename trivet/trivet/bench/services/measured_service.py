"""Single services as child processes, for measurements: started, asked whether they serve, weighed by the CPU time they took, ended."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trivet_chassis.rpc import is_serving
from trivet_proto.errors import ErrorKind, TrivetError

from trivet.bench.process_tree import cpu_seconds

READY_WITHIN_S = 30.0
GONE_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A running service."""

    name: str
    process: asyncio.subprocess.Process

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return cpu_seconds(self.process.pid)


@asynccontextmanager
async def measured(module: str, *flags: str, folder: Path) -> AsyncIterator[Measured]:
    """`python -m module flags`; its log goes to a file in `folder` and is shown when it ends by itself."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIVET_")} | {"OMP_NUM_THREADS": "1"}
    path = folder / f"{module}.log"
    with path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *flags, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        yield Measured(module, process)
        if process.returncode is not None:
            raise TrivetError(
                ErrorKind.UNAVAILABLE, f"{module} ended with {process.returncode}:\n{path.read_text(errors='replace')[-3000:]}"
            )
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), GONE_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def until_serving(address: str, service: Measured, name: str = "") -> None:
    """Wait until the health service at `address` says so of `name`. Raises `TrivetError` when it does not come."""
    for _ in range(int(READY_WITHIN_S / 0.05)):
        if service.process.returncode is not None or await is_serving(address, service=name):
            return
        await asyncio.sleep(0.05)
    raise TrivetError(ErrorKind.UNAVAILABLE, f"{service.name} does not serve within {READY_WITHIN_S:g} s")
