"""With at most 64 tokens a step every longer prompt is computed in pieces, beside decodes of others; nothing of it shows in the output."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.agreement import all_at_once, assert_agreement
from tests.deployment import deployed
from tests.gateway import calling
from tests.references.greedy import read_references

REFERENCES = read_references()
CHUNK = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_url() -> AsyncIterator[str]:
    async with deployed("--max-num-batched-tokens", str(CHUNK)) as deployment:
        yield deployment.base_url


async def test_prompts_in_chunks_of_64_are_continued_as_in_transformers(base_url: str) -> None:
    async with calling(base_url) as gateway:
        answers = await all_at_once(gateway, REFERENCES)
        assert_agreement(REFERENCES, answers)
        computed = sum(len(reference.prompt_ids) for reference in REFERENCES)
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        await gateway.idle()
        steps = (await gateway.metrics())["trivet_engine_steps_total"]
        assert steps >= (computed - cached) / CHUNK, "more was computed in a step than the budget allows"


async def test_the_context_after_many_chunks_is_whole(base_url: str) -> None:
    """The same long prompt in one stream and in a batch that competes for the same budget."""
    longest = max(REFERENCES, key=lambda reference: len(reference.prompt_ids))
    short = [reference for reference in REFERENCES if reference.kind == "short"]
    async with calling(base_url) as gateway:
        answers = await all_at_once(gateway, [longest, *short], cache_salt="competing")
        assert_agreement([longest, *short], answers)
