"""With too few KV blocks for what runs, requests are preempted and computed again; no token may be lost, repeated or changed by it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.agreement import all_at_once, assert_agreement
from tests.deployment import deployed
from tests.gateway import Gateway, calling, deltas_of, finish_of, ids_of, together
from tests.references.greedy import read_references

BLOCK = 16
# The long prompts come last: the others fill the pool first, and outgrow it together.
REFERENCES = sorted(read_references(), key=lambda reference: len(reference.prompt_ids))
LONGEST = max(len(reference.prompt_ids) + len(reference.output_ids) for reference in REFERENCES)
POOL = LONGEST // BLOCK + 8
"""Blocks that hold the longest request alone, and little more."""

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "return_token_ids": True}
SUBJECTS = ("the sea", "a clock", "bread", "an old map", "winter", "the moon", "a violin", "rust", "a garden", "smoke", "glass", "a bridge")
PROMPT = 96
TOKENS = POOL * BLOCK // len(SUBJECTS) - PROMPT + 24
"""So many that all prompts fit the pool at once, and their stories do not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cramped_url() -> AsyncIterator[str]:
    async with deployed("--num-kv-blocks", str(POOL + 1)) as deployment:
        yield deployment.base_url


@pytest_asyncio.fixture
async def cramped(cramped_url: str) -> AsyncIterator[Gateway]:
    """A caller of the deployment with few blocks; afterwards all of them must be free again."""
    async with calling(cramped_url) as caller:
        yield caller
        await caller.idle()


async def preemptions(gateway: Gateway) -> float:
    return (await gateway.metrics())["vllm:num_preemptions_total"]


async def beginnings(gateway: Gateway) -> list[list[int]]:
    texts = [f"This is all that I know about {subject} today. " * 12 for subject in SUBJECTS]
    return [ids[:PROMPT] for ids in await together(*map(gateway.tokenize, texts))]


async def stories(gateway: Gateway, **fields: Any) -> list[Any]:
    """One seeded story a subject, all at once."""
    wishes = SAMPLED | {"max_tokens": TOKENS} | fields
    prompts = await beginnings(gateway)
    return await together(*(gateway.complete(prompt, seed=seed, **wishes) for seed, prompt in enumerate(prompts)))


async def test_preempted_prompts_are_continued_as_in_transformers(cramped: Gateway) -> None:
    before = await preemptions(cramped)
    answers = await all_at_once(cramped, REFERENCES)
    assert await preemptions(cramped) > before
    assert_agreement(REFERENCES, answers)


async def test_seeded_sampling_gives_the_same_tokens_after_a_preemption(cramped: Gateway, gateway: Gateway) -> None:
    roomy = await stories(gateway)
    before = await preemptions(cramped)
    tight = await stories(cramped)
    assert await preemptions(cramped) > before
    assert [ids_of(answer) for answer in tight] == [ids_of(answer) for answer in roomy]
    assert [answer["choices"][0]["text"] for answer in tight] == [answer["choices"][0]["text"] for answer in roomy]
    assert all(answer["usage"]["completion_tokens"] == TOKENS for answer in tight)


async def test_penalties_count_the_same_tokens_after_a_preemption(cramped: Gateway, gateway: Gateway) -> None:
    """What a request was penalised for is not forgotten when it is computed again."""
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0}
    roomy = await stories(gateway, **penalties)
    before = await preemptions(cramped)
    tight = await stories(cramped, **penalties)
    assert await preemptions(cramped) > before
    assert [ids_of(answer) for answer in tight] == [ids_of(answer) for answer in roomy]


async def test_a_preempted_stream_delivers_every_token_once(cramped: Gateway, gateway: Gateway) -> None:
    whole = await stories(gateway, logprobs=1)
    before = await preemptions(cramped)
    prompts = await beginnings(cramped)
    wishes = SAMPLED | {"max_tokens": TOKENS, "logprobs": 1}
    streams = await together(*(cramped.stream_completion(prompt, seed=seed, **wishes) for seed, prompt in enumerate(prompts)))
    assert await preemptions(cramped) > before
    for chunks, answer in zip(streams, whole, strict=True):
        choice = answer["choices"][0]
        pieces = [piece for chunk in chunks for piece in chunk["choices"]]
        assert [token for piece in pieces for token in piece["token_ids"]] == ids_of(answer)
        assert "".join(deltas_of(chunks)) == choice["text"]
        assert finish_of(chunks) == "length"
        logprobs = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
