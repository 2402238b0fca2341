"""One scheduler between mock workers that take no time and a frontend that only counts.

So many requests decode at one time; one that ends is followed by another at once. The scheduler has a process of its own, and so has each
mock worker. CPU is user and system time over the steps that were answered. Where the busiest worker's CPU comes near a whole core, the mock
worker was the limit.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trivet_chassis.rpc import create_channel
from trivet_doubles.mock_frontend import MockFrontend
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc

from trivet.bench.report import progress_bar
from trivet.bench.services.measured_service import Measured, measured, until_serving

WARM_UP_S = 0.5
REACHED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerOrder:
    """What is measured; `prompt` and `tokens` are those of each request."""

    requests: Sequence[int]  # at one time, one measurement each
    workers: int
    prompt: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
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


async def ask_forever(frontend: MockFrontend, index: int, order: SchedulerOrder) -> None:
    """Prompts begin differently, so that no request finds another's blocks."""
    for turn in range(1_000_000):
        prompt = [1 + index % 250, 1 + turn % 250, *range(3, 1 + order.prompt)]
        (child,) = frontend.add(prompt, max_tokens=order.tokens, seed=index)
        await child.ended.wait()
        if child.error is not None:
            raise child.error


async def measure(deployment: Deployment, requests: int, order: SchedulerOrder) -> SchedulerFigures:
    asking = [asyncio.create_task(ask_forever(deployment.frontend, index, order)) for index in range(requests)]
    try:
        async with asyncio.timeout(REACHED_WITHIN_S):
            while (await deployment.load()).requests_running < requests:
                await asyncio.sleep(0.05)
        await asyncio.sleep(WARM_UP_S)
        before, tokens = await deployment.load(), deployment.count.tokens
        cpu, workers = deployment.scheduler.cpu_seconds(), [worker.cpu_seconds() for worker in deployment.workers]
        started = time.perf_counter()
        await asyncio.sleep(order.seconds)
        seconds = time.perf_counter() - started
        after = await deployment.load()
        return SchedulerFigures(
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


async def measure_all(order: SchedulerOrder, folder: Path) -> list[SchedulerFigures]:
    """Sockets and logs go into `folder`. Raises `TrivetError` where a service does not come."""
    blocks = 1 + max(order.requests) * (-(-(order.prompt + order.tokens) // 16) + 1)
    figures = []
    with progress_bar(len(order.requests)) as bar:
        for requests in order.requests:
            bar.describe(f"{requests} requests")
            # A fresh deployment each: what the one before left running must not be measured with the next.
            async with deployed(order, folder, blocks) as deployment:
                figures.append(await measure(deployment, requests, order))
            bar.advance()
    return figures


@asynccontextmanager
async def deployed(order: SchedulerOrder, folder: Path, blocks: int) -> AsyncIterator[Deployment]:
    address = f"unix:{folder}/s.sock"
    worker_flags = ("--synthetic", "--scheduler", address, "--metrics-listen", "", "--log-level", "warning")
    sizes = ("--num-kv-blocks", str(max(1024, blocks)), "--max-num-seqs", str(max(256, *order.requests)))
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            measured("trivet_scheduler", "--listen", address, "--metrics-listen", "", "--log-level", "warning", folder=folder)
        )
        await until_serving(address, scheduler, "live")
        workers = []
        for index in range(order.workers):
            listen = f"unix:{folder}/w{index}.sock"
            flags = (*worker_flags, *sizes, "--name", f"worker-{index}", "--listen", listen)
            workers.append(await stack.enter_async_context(measured("trivet_doubles.mock_worker", *flags, folder=folder)))
            await until_serving(listen, workers[-1], "ready")
        channel, count = await stack.enter_async_context(create_channel(address)), Count()
        frontend = await stack.enter_async_context(MockFrontend(address, on_outputs=count.add))
        yield Deployment(frontend, engine_pb2_grpc.EngineServiceStub(channel), count, scheduler, workers)
