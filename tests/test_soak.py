"""Random requests for minutes: the memory of worker, scheduler and frontend comes to rest and stays there.

`TRIVET_SOAK_MINUTES` says how long; an hour is what a release takes.
"""

import asyncio
import contextlib
import os
import random
import statistics
from typing import Any

import psutil
import pytest

from tests.deployment import Deployment, deployed
from tests.gateway import Gateway, calling

MINUTES = float(os.environ.get("TRIVET_SOAK_MINUTES", "5"))
WORDS = ("river", "stone", "cloud", "lamp", "of", "the", "seven", "runs", "slowly", ",", "and", "then")
CLIENTS = 6
WINDOWS = 6
MOST_GROWTH_MIB = 20
LOOK_EVERY_S = 0.5
SETTLING_S = 60  # of the same requests, before anything is compared
BLOCKS, TOKENS_PER_BLOCK = 400, 16


def random_body(chance: random.Random) -> dict[str, Any]:
    """A completion with whatever of the parameters."""
    body: dict[str, Any] = {
        "prompt": " ".join(chance.choices(WORDS, k=chance.choice((1, 5, 30, 200, 900)))),
        "max_tokens": chance.choice((1, 4, 16, 64)),
        "temperature": chance.choice((0, 0.7, 1.5)),
        "ignore_eos": chance.random() < 0.5,
    }
    choices = {
        "top_p": (0.9, 0.5), "top_k": (1, 40), "min_p": (0.05,), "presence_penalty": (0.5,), "repetition_penalty": (1.2,),
        "logprobs": (0, 5), "prompt_logprobs": (1,), "n": (2, 3), "seed": (7,), "stop": (" and",), "min_tokens": (1,),
        "logit_bias": ({"260": 5}, {str(token): -1 for token in range(500)}), "bad_words": (["stone"],), "cache_salt": ("a", "b"),
        "allowed_token_ids": (list(range(1000)),),
    }  # fmt: skip
    for name in chance.sample(sorted(choices), k=chance.randrange(4)):
        body[name] = chance.choice(choices[name])
    return body


async def ask(gateway: Gateway, chance: random.Random) -> None:
    """One request; of three one is left before its end."""
    body = random_body(chance)
    if chance.random() < 0.67:
        await gateway.answer("/v1/completions", body)
        return
    body.pop("prompt_logprobs", None)  # not served with a stream
    most = chance.randrange(6)
    async with gateway.streaming("/v1/completions", body) as chunks:
        seen = 0
        async for _ in chunks:
            seen += 1
            if seen > most:
                return


async def keep_asking(server: Deployment, number: int, until: float) -> int:
    chance, asked = random.Random(number), 0
    async with calling(server.base_url) as gateway:
        while asyncio.get_running_loop().time() < until:
            await ask(gateway, chance)
            asked += 1
    return asked


async def keep_all_asking(server: Deployment, seconds: float) -> int:
    """Returns how many requests that were."""
    until = asyncio.get_running_loop().time() + seconds
    return sum(await asyncio.gather(*(keep_asking(server, number, until) for number in range(CLIENTS))))


async def touch_the_cache(server: Deployment) -> None:
    """Memory that was never written takes nothing yet, so all blocks are written before anything is compared."""
    async with calling(server.base_url) as gateway:
        for number in range(-(-BLOCKS * TOKENS_PER_BLOCK // 1000) + 1):
            await gateway.complete([1000 + number] * 1000, max_tokens=4, ignore_eos=True)


async def watch(processes: dict[str, psutil.Process], sizes: dict[str, list[float]]) -> None:
    while True:
        for service, process in processes.items():
            sizes[service].append(process.memory_info().rss / 2**20)
        await asyncio.sleep(LOOK_EVERY_S)


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 600)
async def test_memory_comes_to_rest_under_random_requests() -> None:
    """What a window's median says is compared, not its peaks: a long prompt's logits are 25 MiB while they are needed."""
    async with deployed("--num-kv-blocks", str(BLOCKS), dtype="auto") as server:
        await touch_the_cache(server)
        processes = {service: server.process_of(service) for service in ("worker", "scheduler", "frontend")}
        sizes: dict[str, list[float]] = {service: [] for service in processes}
        await keep_all_asking(server, SETTLING_S)
        watching = asyncio.create_task(watch(processes, sizes))
        asked = await keep_all_asking(server, 60 * MINUTES)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    print(f"{asked} requests")
    for service, values in sizes.items():
        width = len(values) // WINDOWS
        medians = [statistics.median(values[width * window : width * (window + 1)]) for window in range(WINDOWS)]
        print(f"{service}: {', '.join(f'{size:.1f}' for size in medians)} MiB")
        assert max(medians[1:]) - medians[1] <= MOST_GROWTH_MIB, (service, medians)
