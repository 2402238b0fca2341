"""The servers that a command compares: one that runs already, or one that is started here, asked until it answers, weighed and stopped."""

import asyncio
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet.bench.load.exchange import Exchange, Target, exchange
from trivet.bench.load.prompts import BodyOptions, make_bodies
from trivet.bench.load.stream import Failure, read, timed_lines
from trivet.bench.load.workloads import Lengths, Workload
from trivet.bench.process_tree import Footprint, end, footprint, resume, suspend, tree

FIRST = Workload("first", "the first answer", 1, 1, 0, Lengths(8), Lengths(4))
GONE_WITHIN_S = 30.0
ASK_EVERY_S = 0.05
AWAKE_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Where a server is to be found, and the command that starts it; none where it runs already."""

    name: str
    url: str
    command: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str, flag: str) -> "ServerPlan":
        """A URL, NAME=URL, or NAME=COMMAND in which {port} stands for the port. Raises `TrivetError`."""
        schemes = ("http://", "https://")
        name, found, command = ("", "", text) if text.startswith(schemes) else text.partition("=")
        if command.startswith(schemes):
            return cls(name or command.partition("://")[2].rstrip("/"), command)
        if not found or not name or "{port}" not in command:
            raise invalid(f"{flag} {text}: a URL is wanted, or NAME=COMMAND with {{port}} where the command takes its port")
        port = free_port()
        return cls(name, f"http://127.0.0.1:{port}", shlex.split(command.replace("{port}", str(port))))

    @classmethod
    def of_trivet(cls, flags: Sequence[str]) -> "ServerPlan":
        """A `trivet serve` of our own with these flags."""
        if any(flag == "--port" or flag.startswith("--port=") for flag in flags):
            raise invalid("--port after --: the port is chosen here; with --url a server that runs already is measured")
        port = free_port()
        return cls("trivet", f"http://127.0.0.1:{port}", (sys.executable, "-m", "trivet", "serve", "--port", str(port), *flags))


@dataclass(slots=True)
class Server:
    """One that answers. `ready_s` is from its start to the end of its first answer, None where it was not started here."""

    name: str
    url: str
    target: Target
    model: str | None
    process: subprocess.Popen[bytes] | None = None
    ready_s: float | None = None
    footprints: dict[int, Footprint] = field(default_factory=dict)

    def weigh(self) -> None:
        """Keep the most memory that each of its processes had when it was asked; only where it was started here."""
        for pid in tree(self.process.pid) if self.process is not None else ():
            now, before = footprint(pid), self.footprints.get(pid)
            if now is not None:
                most = now.pss_mib if before is None else max(before.pss_mib, now.pss_mib)
                self.footprints[pid] = Footprint(pid, now.name, most, now.peak_rss_mib)

    def rest(self) -> None:
        """Stand still, so that it takes nothing from the one that is measured; only where it was started here."""
        if self.process is not None:
            suspend(self.process.pid)

    async def wake(self, options: BodyOptions) -> None:
        """Go on, and answer once: links that timed out meanwhile are made anew before anything counts. Raises `TrivetError`."""
        if self.process is None:
            return
        resume(self.process.pid)
        attempt, by = 0, time.perf_counter() + AWAKE_WITHIN_S
        while (fault := await _first_answer(self, options, attempt)) is not None:
            attempt += 1
            if time.perf_counter() > by:
                raise TrivetError(ErrorKind.UNAVAILABLE, f"{self.name} does not answer any more after it had stood still: {fault}")
            await asyncio.sleep(ASK_EVERY_S)


@asynccontextmanager
async def serving(
    plan: ServerPlan, path: str, options: BodyOptions, model: str | None, api_key: str, within_s: float
) -> AsyncIterator[Server]:
    """The server, once it has answered; stopped on leaving if it was started here. Raises `TrivetError` where it does not come."""
    target = Target.parse(plan.url, path, api_key, "--url" if not plan.command else plan.name)
    if not plan.command:
        listed = await exchange(_listing(target), b"", within_s)
        if listed.fault and not listed.pieces:
            raise TrivetError(
                ErrorKind.UNAVAILABLE, f"{plan.name} at {plan.url} does not answer: {listed.fault}; start it, or mend the URL"
            )
        yield Server(plan.name, plan.url, target, model or _first_of(listed))
        return
    with tempfile.NamedTemporaryFile("ab") as log:
        started = time.perf_counter()
        try:
            process = subprocess.Popen(plan.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise invalid(f"{plan.name}: {shlex.join(plan.command)} cannot be started: {error}") from error
        try:
            server = Server(plan.name, plan.url, target, model, process)
            attempt = 0
            while (fault := await _first_answer(server, options, attempt)) is not None:
                attempt += 1
                if process.poll() is not None or time.perf_counter() - started > within_s:
                    how = f"ended with {process.returncode}" if process.returncode is not None else f"does not answer within {within_s:g} s"
                    said = Path(log.name).read_text(errors="replace")[-3000:].strip()
                    raise TrivetError(ErrorKind.UNAVAILABLE, f"{plan.name} {how} ({fault}):\n{said}")
                await asyncio.sleep(ASK_EVERY_S)
            server.ready_s = time.perf_counter() - started
            yield server
        finally:
            resume(process.pid)
            await asyncio.to_thread(end, process, GONE_WITHIN_S)


async def served_model(target: Target) -> str | None:
    """The first that it lists; None where it lists none, as some servers serve one model under any name."""
    return _first_of(await exchange(_listing(target), b"", 10.0))


def _listing(target: Target) -> Target:
    head = target.head.replace("POST", "GET", 1)
    root = head.split(" ", 2)[1].rsplit("/v1/", 1)[0]
    _, _, rest = head.partition(" HTTP/1.1")
    return Target(target.host, target.port, f"GET {root}/v1/models HTTP/1.1{rest}")


def _first_of(listing: Exchange) -> str | None:
    lines = list(timed_lines(listing.pieces))
    try:
        listed = msgspec.json.decode(b"\n".join(line for _, line in lines[1:]), type=_Models)
    except msgspec.DecodeError:
        return None
    return listed.data[0].id if listed.data else None


async def _first_answer(server: Server, options: BodyOptions, attempt: int) -> str | None:
    """None when it came, otherwise why not."""
    model = server.model or await served_model(server.target)
    (body,) = make_bodies(FIRST, f"first {attempt}", options, model)
    result = read(await exchange(server.target, body, 120.0))
    if isinstance(result, Failure):
        return result.reason
    server.model = model
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []
