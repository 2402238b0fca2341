"""Servers under workloads: every run of a workload against each server in turn, so that what the machine does meanwhile meets them all.

Those that were started here and are not measured stand still: some spin while they wait for work.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from trivet.bench.load.arrivals import Arrivals
from trivet.bench.load.drive import closed_loop, open_loop
from trivet.bench.load.figures import Figures, Objective, summarize
from trivet.bench.load.prompts import BodyOptions, Endpoint, make_bodies
from trivet.bench.load.stream import read
from trivet.bench.load.workloads import WARM_UP, Workload
from trivet.bench.report import Bar, progress_bar
from trivet.bench.server_under_test import Server, ServerPlan, serving

PATHS: Mapping[Endpoint, str] = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for, checked."""

    servers: Sequence[ServerPlan]
    workloads: Sequence[Workload]
    runs: int
    seed: str
    options: BodyOptions
    model: str | None
    arrivals: Arrivals | None  # None: closed loop
    objective: Objective | None
    api_key: str
    timeout_s: float
    start_timeout_s: float
    warms_up: bool


@dataclass(frozen=True, slots=True)
class Run:
    server: str
    workload: str
    index: int
    figures: Figures


async def measure(order: Order) -> tuple[Sequence[Server], Sequence[Run]]:
    """Start what is to be started, warm up, measure, stop. Raises `TrivetError` where a server does not come."""
    runs: list[Run] = []
    turns = [(workload, index) for workload in order.workloads for index in range(order.runs)]
    async with AsyncExitStack() as stack:
        with progress_bar(len(order.servers) * sum(workload.requests for workload, _ in turns)) as bar:
            servers = []
            for plan in order.servers:  # one after the other: a start is timed
                bar.describe(f"starting {plan.name}")
                path = PATHS[order.options.endpoint]
                entering = serving(plan, path, order.options, order.model, order.api_key, order.start_timeout_s)
                servers.append(await stack.enter_async_context(entering))
            for server in servers if order.warms_up else ():
                bar.describe(f"warming {server.name} up")
                bodies = make_bodies(WARM_UP, f"{order.seed} warm-up", order.options, server.model)
                await closed_loop(server.target, bodies, WARM_UP.concurrency, order.timeout_s, lambda: None)
            for workload, index in turns:
                # Who goes first changes from run to run.
                for server in servers if index % 2 == 0 else reversed(servers):
                    bar.describe(f"{workload.name} run {index + 1} {server.name}")
                    async with _alone(server, servers, order.options):
                        runs.append(Run(server.name, workload.name, index, await _run(order, server, workload, index, bar)))
                    server.weigh()
    return servers, runs


@asynccontextmanager
async def _alone(server: Server, servers: Sequence[Server], options: BodyOptions) -> AsyncIterator[None]:
    others = [other for other in servers if other is not server]
    for other in others:
        other.rest()
    if others:
        await server.wake(options)
    yield
    if others:
        server.rest()


async def _run(order: Order, server: Server, workload: Workload, index: int, bar: Bar) -> Figures:
    seed = f"{order.seed} {workload.name} {index}"
    bodies = make_bodies(workload, seed, order.options, server.model)
    if order.arrivals is None:
        drive = await closed_loop(server.target, bodies, workload.concurrency, order.timeout_s, bar.advance)
    else:
        drive = await open_loop(server.target, bodies, order.arrivals.times(len(bodies), seed), order.timeout_s, bar.advance)
    bar.refresh()
    return summarize([read(each) for each in drive.exchanges], drive.seconds, drive.core_share, order.objective)
