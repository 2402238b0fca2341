"""Processes that stand for the containers of `docker-compose.yml`: same commands, same variables, an address of their own each.

A container's 0.0.0.0 and 127.0.0.1 become a loopback address that no other one has; the ports become free ones, the same for every
replica. What a name means to a container is in a hosts file that only its process sees, where the system lets us do that.
"""

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.deploy.compose_file import environment_of
from tests.deploy.dockerfile import read_dockerfile
from tests.deployment import GONE_WITHIN, eventually, free_port

_hosts = itertools.count(1)


@cache
def has_private_files() -> bool:
    """Whether a process here may see another /etc/hosts than the rest."""
    command = ["unshare", "--map-root-user", "--mount", "mount", "--bind", "/dev/null", "/etc/hosts"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def own_address() -> str:
    """A loopback address that nobody else in this test run has, nor another run on this machine."""
    return f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{next(_hosts)}"


@dataclass(slots=True)
class Ports:
    """Free ports in place of those of the Compose file; each is always replaced by the same one."""

    taken: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, port: int) -> int:
        return self.taken.setdefault(port, free_port())

    def rewrite(self, address: str, host: str) -> str:
        """`0.0.0.0:PORT` or `127.0.0.1:PORT`, anywhere in a text, as one at `host`."""
        return re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)", lambda found: f"{host}:{self[int(found[1])]}", address)


@dataclass(frozen=True, slots=True)
class Container:
    """One running process; `url` is where its HTTP side answers."""

    name: str
    host: str
    url: str
    process: asyncio.subprocess.Process
    health: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    async def asked(self, question: str) -> int:
        """The exit code of the health check of its image, which asks for `live`, or of the same about something else."""
        command = [word.replace("/health/live", f"/health/{question}") for word in self.health]
        check = await asyncio.create_subprocess_exec(*command, env=dict(self.environment), stdout=asyncio.subprocess.DEVNULL)
        return await check.wait()

    async def until(self, question: str, *, within: float) -> None:
        async def well() -> bool:
            assert self.process.returncode is None, f"{self.name} ended:\n{self.log[-6000:]}"
            return await self.asked(question) == 0

        await eventually(well, within=within, what=f"{self.name} is {question}")

    async def leave(self) -> None:
        """SIGTERM, as an engine stops a container; the exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(self.process.wait(), GONE_WITHIN)
        assert self.process.returncode == 0, f"{self.name} left with {self.process.returncode}:\n{self.log[-6000:]}"


@asynccontextmanager
async def container(
    service: str,
    project: Mapping[str, Any],
    ports: Ports,
    folder: Path,
    *,
    python: str = sys.executable,
    names: Mapping[str, Sequence[str]] | None = None,
    own: Mapping[str, str] | None = None,
) -> AsyncIterator[Container]:
    """A process of `service` with the variables that `project` gives it and then those of `own`; `names` is what it can look up."""
    image = read_dockerfile(project["services"][service]["image"].removeprefix("trivet-"))
    host = own_address()
    name = f"{service}-{host}"
    environment = {key: ports.rewrite(value, host) for key, value in environment_of(dict(project), service).items()}
    if service == "frontend":  # the one service whose host and port are two settings
        environment |= {"TRIVET_FRONTEND_HOST": host, "TRIVET_FRONTEND_PORT": str(ports[int(environment["TRIVET_FRONTEND_PORT"])])}
    command = [python, *image.last("ENTRYPOINT").words[1:]]
    for key, addresses in (names or {}).items():
        for variable, value in environment.items():
            environment[variable] = _named(value, key, addresses, ports)
    if names and has_private_files():
        hosts_file = folder / f"{name}.hosts"
        hosts_file.write_text("".join(f"{address} {key}\n" for key, addresses in names.items() for address in addresses))
        script = f'mount --bind {hosts_file} /etc/hosts && exec "$@"'
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command]
    environment |= {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"} | dict(own or {})
    log_file = folder / f"{name}.log"
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
        )
    _, *arguments = image.health_command
    health = (python, *(ports.rewrite(word, host) for word in arguments))
    running = Container(name, host, health[-1].removesuffix("/health/live"), process, health, environment, log_file)
    try:
        yield running
        if process.returncode is None:
            await running.leave()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _named(value: str, name: str, addresses: Sequence[str], ports: Ports) -> str:
    """`dns:NAME:PORT` with its port rewritten; where names cannot be given, what it would resolve to."""

    def replaced(found: re.Match[str]) -> str:
        port = ports[int(found[1])]
        if has_private_files():
            return f"dns:{name}:{port}"
        return ",".join(f"{address}:{port}" for address in addresses)

    return re.sub(rf"dns:{re.escape(name)}:(\d+)", replaced, value)
