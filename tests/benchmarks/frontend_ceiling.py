"""What text and HTTP cost: one frontend, fed by a mock scheduler that takes no time, asked over a Unix socket.

    .venv/bin/python -m tests.benchmarks.frontend_ceiling --concurrency 1,16,64

Each of so many clients asks for a completion, reads it to its end and asks again, on a connection of its own each time. The frontend has a
process of its own, and so has the mock scheduler; clients do as little as they can. CPU is user and system time of the frontend over the
tokens that it delivered. Where `mock CPU` comes near a whole core, the mock scheduler was the limit. Run nothing else meanwhile.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.benchmarks.processes import Measured, measured, until_serving

WARM_UP_S = 0.5
PROMPT_IDS = 64


@dataclass(slots=True)
class Tally:
    """What the clients have counted since the last reset."""

    requests: int = 0
    tokens: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table; CPU in seconds of the measured span."""

    concurrency: int
    streams: bool
    seconds: float
    requests: int
    tokens: int
    failures: int
    frontend_cpu: float
    mock_cpu: float

    def row(self) -> tuple[str, ...]:
        per_token = 1e6 * self.frontend_cpu / self.tokens if self.tokens else 0.0
        return (
            str(self.concurrency),
            "stream" if self.streams else "whole",
            f"{self.requests / self.seconds:.1f}",
            f"{self.tokens / self.seconds:.0f}",
            f"{per_token:.1f}",
            f"{100 * self.frontend_cpu / self.seconds:.0f} %",
            f"{100 * self.mock_cpu / self.seconds:.0f} %",
            str(self.failures),
        )


async def ask(socket: str, body: bytes) -> bool:
    """One request on a connection of its own; whether it was answered to its end."""
    reader, writer = await asyncio.open_unix_connection(socket, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    try:
        first = tail = await reader.read(1 << 16)
        while piece := await reader.read(1 << 16):
            tail = (tail + piece)[-2048:]
    finally:
        writer.close()
    return first.startswith(b"HTTP/1.1 200") and (b"data: [DONE]" in tail or b'"usage"' in tail)


async def client(socket: str, body: bytes, tokens: int, tally: Tally) -> None:
    while True:
        if await ask(socket, body):
            tally.requests += 1
            tally.tokens += tokens
        else:
            tally.failures += 1


async def measure(
    socket: str, concurrency: int, frontend: Measured, mock: Measured, arguments: argparse.Namespace, *, streams: bool
) -> Figures:
    tally = Tally()
    body = json.dumps(
        {"model": "synthetic", "prompt": list(range(10, 10 + PROMPT_IDS)), "max_tokens": arguments.tokens, "seed": 1, "stream": streams}
    ).encode()
    clients = [asyncio.create_task(client(socket, body, arguments.tokens, tally)) for _ in range(concurrency)]
    try:
        await asyncio.sleep(WARM_UP_S)
        before = (tally.requests, tally.tokens, tally.failures)
        started, frontend_cpu, mock_cpu = time.perf_counter(), frontend.cpu_seconds(), mock.cpu_seconds()
        await asyncio.sleep(arguments.seconds)
        return Figures(
            concurrency=concurrency,
            streams=streams,
            seconds=time.perf_counter() - started,
            requests=tally.requests - before[0],
            tokens=tally.tokens - before[1],
            failures=tally.failures - before[2],
            frontend_cpu=frontend.cpu_seconds() - frontend_cpu,
            mock_cpu=mock.cpu_seconds() - mock_cpu,
        )
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def measure_all(arguments: argparse.Namespace, folder: Path) -> list[Figures]:
    scheduler, socket, public = f"unix:{folder}/s.sock", f"{folder}/http.sock", f"unix:{folder}/grpc.sock"
    mock_flags = ("--synthetic", "--listen", scheduler, "--metrics-listen", "", "--max-num-seqs", "4096")
    frontend_flags = ("--scheduler", scheduler, "--uds", socket, "--grpc-listen", public, "--log-level", "warning")
    async with (
        measured("trivet_doubles.mock_scheduler", *mock_flags, folder=folder) as mock,
        measured("trivet_frontend", *frontend_flags, folder=folder) as frontend,
    ):
        await until_serving(public, frontend, "ready")
        figures = []
        steps = [(concurrency, streams) for concurrency in arguments.concurrency for streams in (True, False)]
        for concurrency, streams in track(steps, description="measuring the frontend", console=Console(stderr=True), transient=True):
            figures.append(await measure(socket, concurrency, frontend, mock, arguments, streams=streams))
        return figures


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64], help="clients at one time, several separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for so long each")
    arguments = parser.parse_args()
    # A socket's path has room for about 100 characters.
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        figures = asyncio.run(measure_all(arguments, Path(folder)))
    table = Table(title=f"one frontend, answers of {arguments.tokens} tokens; CPU of one core", box=MARKDOWN)
    for column in ("clients", "answers", "requests/s", "tokens/s", "CPU µs/token", "frontend CPU", "mock CPU", "failed"):
        table.add_column(column, justify="right")
    for line in figures:
        table.add_row(*line.row())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
