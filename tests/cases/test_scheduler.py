"""Requests that can never fit, and prompts that end with a block."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.deployment import Deployment, deployed
from tests.gateway import Gateway, Refusal, calling, ids_of, together

COMPLETIONS = "/v1/completions"
BLOCK = 16
POOL = 49
CONTEXT = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small() -> AsyncIterator[Deployment]:
    """A pool of 49 blocks, and the null block, for a context of 2048 tokens."""
    async with deployed("--num-kv-blocks", str(POOL + 1), "--max-model-len", str(CONTEXT)) as deployment:
        yield deployment


@pytest_asyncio.fixture
async def small_gateway(small: Deployment) -> AsyncIterator[Gateway]:
    """A caller of the small pool; afterwards all of it must be free."""
    async with calling(small.base_url) as caller:
        yield caller
        await caller.idle()
        assert (await caller.metrics())["trivet_engine_blocks_in_use"] == 0


# Requests larger than the pool


async def refused_in_time(gateway: Gateway) -> Refusal:
    started = time.monotonic()
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": [19556] * 1002, "max_tokens": 8})
    assert time.monotonic() - started < 2
    return refusal


async def test_a_prompt_larger_than_the_pool_is_refused_with_both_sizes(small_gateway: Gateway) -> None:
    refusal = await refused_in_time(small_gateway)
    assert refusal.status == 400
    assert re.search(r"\b(63|1002)\b", refusal.message)
    assert re.search(rf"\b({POOL}|{POOL * BLOCK})\b", refusal.message)


async def test_a_request_that_outgrows_the_pool_ends_with_length_at_its_capacity(small_gateway: Gateway) -> None:
    answer = await small_gateway.complete([19556] * 600, max_tokens=400, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    # The last token needs no place in the cache: it is not run.
    assert answer["usage"]["completion_tokens"] in (POOL * BLOCK - 600, POOL * BLOCK - 600 + 1)


async def test_a_short_request_behind_five_that_never_fit_is_served_at_once(small_gateway: Gateway) -> None:
    impossible = [asyncio.create_task(refused_in_time(small_gateway)) for _ in range(5)]
    await asyncio.wait_for(small_gateway.still_answers(), 5)
    assert [refusal.status for refusal in await asyncio.gather(*impossible)] == [400] * 5


async def test_a_pool_smaller_than_the_context_is_warned_of_at_start(small: Deployment) -> None:
    warnings = [line for line in small.log().splitlines() if re.search("warning", line, re.IGNORECASE)]
    assert any(str(CONTEXT) in line for line in warnings), warnings


# Prompts that end with a block

SIXTEEN = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
ODYSSEY = "Tell me, muse, of the man of many ways who wandered far after he had sacked the holy citadel of Troy, and saw many cities. " * 3


async def chat_of_sixteen(gateway: Gateway, **fields: Any) -> Any:
    return await gateway.chat(SIXTEEN, max_tokens=8, return_token_ids=True, **fields)


async def test_a_conversation_of_exactly_one_block_is_answered_alike_however_often_it_is_sent(gateway: Gateway) -> None:
    uncached = await chat_of_sixteen(gateway, cache_salt="never before")
    assert uncached["usage"]["prompt_tokens"] == BLOCK
    for _ in range(3):
        answer = await chat_of_sixteen(gateway, cache_salt="one block")
        assert answer["usage"]["prompt_tokens"] == BLOCK
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < BLOCK
        assert ids_of(answer) == ids_of(uncached)


@pytest.mark.parametrize(("length", "least", "most"), [(32, 16, 31), (48, 32, 47)])
async def test_a_prompt_of_whole_blocks_hits_all_but_the_last(gateway: Gateway, length: int, least: int, most: int) -> None:
    prompt = (await gateway.tokenize(ODYSSEY))[:length]
    wishes = {"max_tokens": 8, "return_token_ids": True}
    uncached = await gateway.complete(prompt, cache_salt=f"never {length}", **wishes)
    first = await gateway.complete(prompt, cache_salt=f"often {length}", **wishes)
    repeats = [await gateway.complete(prompt, cache_salt=f"often {length}", **wishes) for _ in range(2)]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for answer in repeats:
        assert least <= answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= most
    assert [ids_of(answer) for answer in (first, *repeats)] == [ids_of(uncached)] * 3


@pytest.mark.parametrize("length", [16, 32, 48])
async def test_a_prompt_of_whole_blocks_sent_twice_at_once_is_answered_alike(gateway: Gateway, length: int) -> None:
    prompt = (await gateway.tokenize(ODYSSEY))[:length]
    wishes = {"max_tokens": 8, "return_token_ids": True}
    alone = await gateway.complete(prompt, cache_salt=f"alone {length}", **wishes)
    for _ in range(2):
        both = await together(*(gateway.complete(prompt, cache_salt=f"both {length}", **wishes) for _ in range(2)))
        assert [ids_of(answer) for answer in both] == [ids_of(alone)] * 2


@pytest.mark.parametrize("length", [16, 32, 48])
async def test_a_prompt_of_whole_blocks_gives_equal_greedy_choices(gateway: Gateway, length: int) -> None:
    prompt = (await gateway.tokenize(ODYSSEY))[:length]
    alone = await gateway.complete(prompt, max_tokens=8, return_token_ids=True, cache_salt=f"single {length}")
    for _ in range(2):
        double = await gateway.complete(prompt, max_tokens=8, n=2, return_token_ids=True, cache_salt=f"double {length}")
        assert ids_of(double, 0) == ids_of(double, 1) == ids_of(alone)
        assert double["usage"]["prompt_tokens"] == length
