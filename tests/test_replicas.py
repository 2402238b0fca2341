"""Several workers serve one model; a killed one's requests go on elsewhere, or when it is back, with the tokens they would have had."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment import Deployment, deployed, eventually
from tests.gateway import Gateway, calling, finish_of, ids_of, text_of

TOKENS = 40
KILL_AFTER = 6
"""Deltas that each stream has seen when its worker is killed."""

COMMON = {"max_tokens": TOKENS, "ignore_eos": True}
SEEDED = COMMON | {"temperature": 0.8, "top_p": 0.95, "seed": 7}
STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", COMMON | {"prompt": "The old lighthouse keeper", "temperature": 0}),
    ("/v1/completions", SEEDED | {"prompt": "A recipe for bread:"}),
    ("/v1/completions", SEEDED | {"prompt": "Dear Sir,", "frequency_penalty": 0.5}),
    ("/v1/chat/completions", COMMON | {"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0}),
    ("/v1/chat/completions", SEEDED | {"messages": [{"role": "user", "content": "Tell me of the sea."}]}),
)
WHOLE: tuple[dict[str, Any], ...] = (
    COMMON | {"prompt": "In the year 1900", "temperature": 0, "return_token_ids": True},
    SEEDED | {"prompt": "Two dogs met", "n": 2, "return_token_ids": True},
)


class Progress:
    """How far the streams of one run are."""

    def __init__(self) -> None:
        self.deltas = [0] * len(STREAMS)

    async def all_are_under_way(self) -> bool:
        return min(self.deltas) >= KILL_AFTER


async def run_stream(gateway: Gateway, index: int, progress: Progress) -> tuple[str, str]:
    path, body = STREAMS[index]
    chunks = []
    async with gateway.streaming(path, body) as arriving:
        async for chunk in arriving:
            chunks.append(chunk)
            progress.deltas[index] += 1
    return text_of(chunks), finish_of(chunks)


async def run_whole(gateway: Gateway, body: dict[str, Any]) -> list[list[int]]:
    answer = await gateway.answer("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == TOKENS * body.get("n", 1)
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    return [ids_of(answer, index) for index in range(len(answer["choices"]))]


async def run_all(gateway: Gateway, progress: Progress) -> list[Any]:
    """Every request at once; what each answered."""
    runs: Sequence[Awaitable[Any]] = [
        *(run_stream(gateway, index, progress) for index in range(len(STREAMS))),
        *(run_whole(gateway, body) for body in WHOLE),
    ]
    return list(await asyncio.gather(*runs))


def pid_of(deployment: Deployment, worker: str) -> int | None:
    return next((one.pid for one in deployment.processes() if f"--name={worker}" in one.cmdline()), None)


async def reading_of(deployment: Deployment, process: str) -> dict[str, float]:
    """The metrics of the scheduler or of a worker, summed over labels; nothing while it isn't there."""
    totals: dict[str, float] = {}
    for socket in deployment.folder.rglob(f"{process}-metrics.sock"):
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=5) as client:
            try:
                page = (await client.get("/metrics")).text
            except httpx.TransportError:
                return {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


async def steps_of(deployment: Deployment, workers: Sequence[str]) -> list[float]:
    return [(await reading_of(deployment, worker)).get("trivet_worker_steps_total", 0.0) for worker in workers]


async def requeued(deployment: Deployment) -> float:
    return (await reading_of(deployment, "scheduler"))["trivet_requests_requeued_total"]


async def until_attached(deployment: Deployment, worker: str, *, but: int) -> None:
    """`but` is the process that it was before."""

    async def is_back() -> bool:
        reading = await reading_of(deployment, worker)
        return pid_of(deployment, worker) not in (None, but) and reading.get("trivet_worker_attached") == 1

    await eventually(is_back, within=60, what=f"{worker} is back")


async def run_with_signal(deployment: Deployment, gateway: Gateway, number: int, *, workers: Sequence[str], victim: str) -> list[Any]:
    """What all requests answered when `victim` was sent a signal while every worker was busy and every stream under way."""
    before = await steps_of(deployment, workers)
    progress = Progress()
    running = asyncio.create_task(run_all(gateway, progress))
    await eventually(progress.all_are_under_way, within=60, what="all streams are under way")
    now = await steps_of(deployment, workers)
    assert all(then < later for then, later in zip(before, now, strict=True)), f"not all work: {before} {now}"
    pid = pid_of(deployment, victim)
    assert pid is not None
    os.kill(pid, number)
    assert not running.done()
    answers = await running
    await until_attached(deployment, victim, but=pid)
    await deployment.until_ready()
    return answers


async def test_streams_end_as_ever_when_one_of_two_workers_goes() -> None:
    async with deployed("--workers", "2") as deployment, calling(deployment.base_url) as gateway:
        wanted = await run_all(gateway, Progress())
        workers = ("worker-0", "worker-1")
        assert await run_with_signal(deployment, gateway, signal.SIGKILL, workers=workers, victim="worker-1") == wanted
        moved = await requeued(deployment)
        assert moved > 0
        assert await run_with_signal(deployment, gateway, signal.SIGTERM, workers=workers, victim="worker-0") == wanted
        assert await requeued(deployment) == moved  # a worker that leaves finishes what runs there
        await gateway.idle()


async def test_streams_end_as_ever_when_the_only_worker_is_killed_and_comes_back() -> None:
    """In bfloat16, where last bits decide more often: what it ran alone or in other chunks the first time has the same bits again."""
    async with deployed("--batch-invariant", "on", dtype="bfloat16") as deployment, calling(deployment.base_url) as gateway:
        wanted = await run_all(gateway, Progress())
        assert await run_with_signal(deployment, gateway, signal.SIGKILL, workers=("worker-0",), victim="worker-0") == wanted
        await gateway.still_answers()
        await gateway.idle()
