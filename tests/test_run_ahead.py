"""Workers that run ahead of their scheduler, or do not, give the same text, asynchronous scheduling on or off.

That both are on is the default, under which all other tests run.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.agreement import all_at_once, assert_agreement, continuation
from tests.deployment import deployed
from tests.gateway import calling, ids_of, together
from tests.references.greedy import read_references

REFERENCES = [reference for reference in read_references() if len(reference.prompt_ids) < 200]
SEEDED = {
    "max_tokens": 48,
    "ignore_eos": True,
    "temperature": 1.0,
    "top_p": 0.95,
    "presence_penalty": 0.3,
    "seed": 5,
    "return_token_ids": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[("1", "2"), ("16", "1")], ids=["not ahead", "one step in flight"])
async def base_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    run_ahead, in_flight = request.param
    variables = {"TRIVET_SCHEDULER_RUN_AHEAD": run_ahead, "TRIVET_SCHEDULER_STEPS_IN_FLIGHT": in_flight}
    async with deployed(variables=variables) as deployment:
        yield deployment.base_url


async def test_prompts_at_once_and_one_alone_are_continued_as_in_transformers(base_url: str) -> None:
    async with calling(base_url) as gateway:
        answers = await all_at_once(gateway, REFERENCES)
        assert_agreement(REFERENCES, answers)
        assert_agreement([REFERENCES[0]], [await continuation(gateway, REFERENCES[0], cache_salt="alone")])


async def test_a_seeded_request_has_its_tokens_alone_and_among_those_that_come_and_go(base_url: str) -> None:
    prompt = list(REFERENCES[1].prompt_ids)
    async with calling(base_url) as gateway:
        alone = await gateway.complete(prompt, **SEEDED)
        others = (gateway.complete(list(other.prompt_ids), max_tokens=7 + 5 * at) for at, other in enumerate(REFERENCES[2:7]))
        beside, *_ = await together(gateway.complete(prompt, **SEEDED), *others)
        assert ids_of(beside) == ids_of(alone)
        assert len(ids_of(alone)) == 48


async def test_a_stop_string_ends_a_run_at_its_place(base_url: str) -> None:
    async with calling(base_url) as gateway:
        plain = await continuation(gateway, REFERENCES[0], max_tokens=40)
        text = plain["choices"][0]["text"]
        stop = text[len(text) // 2 :][:6]
        answer = await continuation(gateway, REFERENCES[0], max_tokens=40, stop=[stop])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == text[: text.index(stop)]
