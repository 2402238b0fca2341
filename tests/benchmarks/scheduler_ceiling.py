"""What scheduling costs: one scheduler between mock workers that take no time and a frontend that only counts.

    .venv/bin/python -m tests.benchmarks.scheduler_ceiling --requests 1,16,64,256

So many requests decode at one time; one that ends is followed by another at once. The scheduler has a process of its own, and so has each
mock worker. CPU is user and system time over the steps that were answered. Where `worker CPU` (the busiest one's) comes near a whole core,
the mock worker was the limit. Run nothing else meanwhile.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table
from trivet_chassis.rpc import create_channel
from trivet_doubles.mock_frontend import MockFrontend
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc

from tests.benchmarks.processes import Measured, measured, until_serving

WARM_UP_S = 0.5
REACHED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table; CPU in seconds of the measured span."""

    requests: int
    seconds: float
    steps: int
    tokens: int
    scheduler_cpu: float
    worker_cpu: float

    def row(self) -> tuple[str, ...]:
        return (
            str(self.requests),
            f"{self.steps / self.seconds:.0f}",
            f"{self.tokens / self.seconds:.0f}",
            f"{1e3 * self.scheduler_cpu / max(1, self.steps):.3f}",
            f"{1e6 * self.scheduler_cpu / max(1, self.tokens):.1f}",
            f"{100 * self.scheduler_cpu / self.seconds:.0f} %",
            f"{100 * self.worker_cpu / self.seconds:.0f} %",
        )


@dataclass(slots=True)
class Count:
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is measured."""

    frontend: MockFrontend
    engine: "engine_pb2_grpc.EngineServiceAsyncStub"
    count: Count
    scheduler: Measured
    workers: list[Measured]

    async def load(self) -> engine_pb2.Load:
        return (await self.engine.GetLoad(engine_pb2.GetLoadRequest())).load


async def ask_forever(frontend: MockFrontend, index: int, arguments: argparse.Namespace) -> None:
    """Prompts begin differently, so that no request finds another's blocks."""
    for turn in range(1_000_000):
        prompt = [1 + index % 250, 1 + turn % 250, *range(3, 1 + arguments.prompt)]
        (child,) = frontend.add(prompt, max_tokens=arguments.tokens, seed=index)
        await child.ended.wait()
        if child.error is not None:
            raise child.error


async def measure(deployment: Deployment, requests: int, arguments: argparse.Namespace) -> Figures:
    asking = [asyncio.create_task(ask_forever(deployment.frontend, index, arguments)) for index in range(requests)]
    try:
        async with asyncio.timeout(REACHED_WITHIN_S):
            while (await deployment.load()).requests_running < requests:
                await asyncio.sleep(0.05)
        await asyncio.sleep(WARM_UP_S)
        before, tokens = await deployment.load(), deployment.count.tokens
        cpu, workers = deployment.scheduler.cpu_seconds(), [worker.cpu_seconds() for worker in deployment.workers]
        started = time.perf_counter()
        await asyncio.sleep(arguments.seconds)
        seconds = time.perf_counter() - started
        after = await deployment.load()
        return Figures(
            requests=requests,
            seconds=seconds,
            steps=after.steps_total - before.steps_total,
            tokens=deployment.count.tokens - tokens,
            scheduler_cpu=deployment.scheduler.cpu_seconds() - cpu,
            worker_cpu=max(worker.cpu_seconds() - then for worker, then in zip(deployment.workers, workers, strict=True)),
        )
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def measure_all(arguments: argparse.Namespace, folder: Path) -> list[Figures]:
    address = f"unix:{folder}/s.sock"
    most = max(arguments.requests)
    blocks = 1 + most * (-(-(arguments.prompt + arguments.tokens) // 16) + 1)
    worker_flags = ("--synthetic", "--scheduler", address, "--metrics-listen", "", "--log-level", "warning")
    sizes = ("--num-kv-blocks", str(max(1024, blocks)), "--max-num-seqs", str(max(256, most)))
    figures = []
    for requests in track(arguments.requests, description="measuring the scheduler", console=Console(stderr=True), transient=True):
        # A fresh deployment each: what the one before left running must not be measured with the next.
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                measured("trivet_scheduler", "--listen", address, "--metrics-listen", "", "--log-level", "warning", folder=folder)
            )
            await until_serving(address, scheduler, "live")
            workers = []
            for index in range(arguments.workers):
                listen = f"unix:{folder}/w{index}.sock"
                flags = (*worker_flags, *sizes, "--name", f"worker-{index}", "--listen", listen)
                workers.append(await stack.enter_async_context(measured("trivet_doubles.mock_worker", *flags, folder=folder)))
                await until_serving(listen, workers[-1], "ready")
            channel, count = await stack.enter_async_context(create_channel(address)), Count()
            frontend = await stack.enter_async_context(MockFrontend(address, on_outputs=count.add))
            deployment = Deployment(frontend, engine_pb2_grpc.EngineServiceStub(channel), count, scheduler, workers)
            figures.append(await measure(deployment, requests, arguments))
    return figures


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=numbers, default=[1, 16, 64, 256], help="requests at one time, several separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="mock workers")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for so long each")
    arguments = parser.parse_args()
    # A socket's path has room for about 100 characters.
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        figures = asyncio.run(measure_all(arguments, Path(folder)))
    title = f"one scheduler, {arguments.workers} mock workers, prompts of {arguments.prompt} tokens; CPU of one core"
    table = Table(title=title, box=MARKDOWN)
    for column in ("requests", "steps/s", "tokens/s", "CPU ms/step", "CPU µs/token", "scheduler CPU", "worker CPU"):
        table.add_column(column, justify="right")
    for line in figures:
        table.add_row(*line.row())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
