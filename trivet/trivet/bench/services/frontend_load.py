"""One frontend, fed by a mock scheduler that takes no time, asked over a Unix socket.

Each of so many clients asks for a completion, reads it to its end and asks again, on a connection of its own each time. The frontend has a
process of its own, and so has the mock scheduler; clients do as little as they can. CPU is user and system time of the frontend over the
tokens that it delivered. Where the mock scheduler's CPU comes near a whole core, it was the limit.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trivet.bench.report import progress_bar
from trivet.bench.services.measured_service import Measured, measured, until_serving

WARM_UP_S = 0.5
PROMPT_IDS = 64


@dataclass(slots=True)
class Tally:
    """What the clients have counted since the last reset."""

    requests: int = 0
    tokens: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class FrontendOrder:
    concurrency: Sequence[int]  # clients at one time, one measurement each
    tokens: int  # of each answer
    seconds: float


@dataclass(frozen=True, slots=True)
class FrontendFigures:
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
    socket: str, concurrency: int, frontend: Measured, mock: Measured, order: FrontendOrder, *, streams: bool
) -> FrontendFigures:
    tally = Tally()
    body = json.dumps(
        {"model": "synthetic", "prompt": list(range(10, 10 + PROMPT_IDS)), "max_tokens": order.tokens, "seed": 1, "stream": streams}
    ).encode()
    clients = [asyncio.create_task(client(socket, body, order.tokens, tally)) for _ in range(concurrency)]
    try:
        await asyncio.sleep(WARM_UP_S)
        before = (tally.requests, tally.tokens, tally.failures)
        started, frontend_cpu, mock_cpu = time.perf_counter(), frontend.cpu_seconds(), mock.cpu_seconds()
        await asyncio.sleep(order.seconds)
        return FrontendFigures(
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


async def measure_all(order: FrontendOrder, folder: Path) -> list[FrontendFigures]:
    scheduler, socket, public = f"unix:{folder}/s.sock", f"{folder}/http.sock", f"unix:{folder}/grpc.sock"
    mock_flags = ("--synthetic", "--listen", scheduler, "--metrics-listen", "", "--max-num-seqs", "4096")
    frontend_flags = ("--scheduler", scheduler, "--uds", socket, "--grpc-listen", public, "--log-level", "warning")
    async with (
        measured("trivet_doubles.mock_scheduler", *mock_flags, folder=folder) as mock,
        measured("trivet_frontend", *frontend_flags, folder=folder) as frontend,
    ):
        await until_serving(public, frontend, "ready")
        figures = []
        steps = [(concurrency, streams) for concurrency in order.concurrency for streams in (True, False)]
        with progress_bar(len(steps)) as bar:
            for concurrency, streams in steps:
                bar.describe(f"{concurrency} clients")
                figures.append(await measure(socket, concurrency, frontend, mock, order, streams=streams))
                bar.advance()
        return figures
