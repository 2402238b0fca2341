"""Two frontends, two schedulers, two workers and the load balancer, with the variables that Compose gives their containers."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from trivet_client import AsyncClient, SamplingParams

from tests.deploy.compose_file import resolved
from tests.deploy.containers import Container, Ports, container
from tests.deploy.load_balancer import LoadBalancer, balancing
from tests.deploy.test_deploy_observability import LOAD_BALANCER, METRIC, expressions
from tests.deployment import READY_WITHIN, eventually

SMALL_WORKER = {"TRIVET_WORKER_DTYPE": "float32", "TRIVET_WORKER_THREADS": "1", "TRIVET_WORKER_KV_CACHE_MEMORY": "128MiB"}
WORK_WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class Suite:
    frontends: Sequence[Container]
    schedulers: Sequence[Container]
    workers: Sequence[Container]
    balancer: LoadBalancer


@asynccontextmanager
async def scaled(folder: Path, count: int, *overlays: str) -> AsyncIterator[Suite]:
    """As `docker compose up --wait` brings them up with each service scaled to `count`: schedulers, workers, frontends."""
    project, ports = resolved(overlays=overlays), Ports()
    async with AsyncExitStack() as stack:

        async def start(service: str, names: dict[str, list[str]], own: dict[str, str]) -> Container:
            return await stack.enter_async_context(container(service, project, ports, folder, names=names, own=own))

        schedulers = [await start("scheduler", {}, {}) for _ in range(count)]
        await asyncio.gather(*(each.until("live", within=READY_WITHIN) for each in schedulers))
        names = {"scheduler": [each.host for each in schedulers]}
        workers = []
        for scheduler in schedulers:
            # A mock worker takes one address and no list of them; here each gets a scheduler of its own.
            home = {"TRIVET_MOCK_WORKER_SCHEDULER": f"{scheduler.host}:{ports[7100]}"}
            workers.append(await start("worker", names, home if "mock-worker" in overlays else SMALL_WORKER))
            # One after the other: workers that look at the same moment for the scheduler with the fewest may choose the same.
            await workers[-1].until("ready", within=READY_WITHIN)
        frontends = [await start("frontend", names, {}) for _ in range(count)]
        await asyncio.gather(*(each.until("ready", within=READY_WITHIN) for each in frontends))
        balancer = await stack.enter_async_context(
            balancing(folder, *(each.host for each in frontends), http_port=ports[8000], grpc_port=ports[8001])
        )
        await balancer.until_ready()
        yield Suite(frontends, schedulers, workers, balancer)


async def metrics_of(service: Container) -> dict[str, float]:
    """Every series of its page, summed over its labels."""
    async with httpx.AsyncClient(timeout=10) as client:
        page = (await client.get(f"{service.url}/metrics")).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def complete(client: httpx.AsyncClient, number: int) -> str:
    answer = await client.post("/v1/completions", json={"prompt": f"{number} is a number, and", "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlays", [("mock-worker",), pytest.param((), marks=pytest.mark.long)], ids=["mock workers", "workers"])
async def test_two_of_each_serve_together_and_all_of_them_work(overlays: tuple[str, ...], tmp_path: Path) -> None:
    async with scaled(tmp_path, 2, *overlays) as suite:
        for frontend in suite.frontends:
            async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
                assert all(await asyncio.gather(*(complete(client, number) for number in range(8))))

        async def all_have_worked() -> bool:
            assert all(await asyncio.gather(*(complete(suite.balancer.http, 100 + number) for number in range(8))))
            tokens = [(await metrics_of(each)).get("vllm:generation_tokens_total", 0) for each in suite.schedulers]
            requests = [(await metrics_of(each)).get("vllm:request_success_total", 0) for each in suite.frontends]
            # More than the eight that each was sent itself: the load balancer uses both.
            return all(tokens) and all(count > 8 for count in requests)

        await eventually(all_have_worked, within=WORK_WITHIN, what="both schedulers' workers have run, and both frontends answered")
        assert [(await metrics_of(each))["trivet_replicas_ready"] for each in suite.schedulers] == [1, 1]
        assert [(await metrics_of(each))["trivet_sessions"] for each in suite.schedulers] == [2, 2]
        await streams_through(suite.balancer)
        async with AsyncClient(suite.balancer.grpc) as client:
            answers = await asyncio.gather(*(client.complete("Two,", SamplingParams(max_tokens=2, temperature=0)) for _ in range(4)))
        assert all(answer.text for answer in answers)
        await shows_what_the_dashboard_asks_for(suite, ("frontend", "scheduler") if overlays else ("frontend", "scheduler", "worker"))

        # One of each leaves, as for a new version: nobody who calls the load balancer sees it.
        calls = asyncio.gather(*(complete(suite.balancer.http, 200 + number) for number in range(24)))
        await suite.frontends[0].leave()
        assert all(await calls)
        await suite.workers[0].leave()

        async def left_out() -> bool:
            return (await metrics_of(suite.frontends[1]))["trivet_engine_replicas_ready"] == 1

        # A scheduler says each second how many workers it has. What it is sent before it has said so waits for another worker there.
        await eventually(left_out, within=WORK_WITHIN, what="the frontend knows which scheduler has a worker")
        assert all(await asyncio.gather(*(complete(suite.balancer.http, 300 + number) for number in range(8))))


async def streams_through(balancer: LoadBalancer) -> None:
    body = {"prompt": "One, two,", "max_tokens": 16, "temperature": 0, "stream": True}
    pieces = []
    async with balancer.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            pieces.append(piece)
    assert b"".join(pieces).rstrip().endswith(b"data: [DONE]")
    assert len(pieces) > 4, "the stream came in a few large pieces: something held it back"


async def shows_what_the_dashboard_asks_for(suite: Suite, jobs: Sequence[str]) -> None:
    """Each series of each panel is on a page of the job that it names, or of one of `jobs` where it names none."""
    first = {"frontend": suite.frontends[0], "scheduler": suite.schedulers[0], "worker": suite.workers[0]}
    pages = {job: await metrics_of(first[job]) for job in jobs}
    for expression in expressions():
        for name, labels in re.findall(rf"({METRIC.pattern})(\{{[^}}]*\}})?", expression):
            picked = re.search(r'job="(\w+)"', labels)
            asked = [picked[1]] if picked else jobs
            if name in LOAD_BALANCER or (name.startswith("trivet_worker_") and "worker" not in jobs):
                continue
            assert any(name in pages[job] for job in asked), f"{name} is on no page of {asked}"
