"""Greedy output through the running services equals what transformers makes of the same weights, token for token."""

import pytest
from tokenizers import Tokenizer
from trivet_checkpoint import open_checkpoint, resolve_model

from tests.agreement import all_at_once, assert_agreement, continuation
from tests.gateway import Gateway
from tests.references.greedy import Reference, read_references
from tests.references.prompts import PROMPTS

REFERENCES = read_references()


def test_the_references_are_twenty_prompts_of_every_kind_without_a_near_tie() -> None:
    assert len(REFERENCES) == 20
    assert {reference.kind for reference in REFERENCES} == {"short", "chat", "code", "language", "long"}
    assert sum(len(reference.prompt_ids) >= 1000 for reference in REFERENCES) >= 2
    assert all(len(reference.output_ids) == len(reference.gaps) == 64 for reference in REFERENCES)
    assert min(min(reference.gaps) for reference in REFERENCES) > 1e-3


def test_the_ids_of_the_references_are_those_of_their_texts() -> None:
    tokenizer = Tokenizer.from_str(open_checkpoint(resolve_model(None)).tokenizer_json().decode())
    texts = {prompt.name: prompt.text for prompt in PROMPTS}
    for reference in REFERENCES:
        assert tuple(tokenizer.encode(texts[reference.name], add_special_tokens=False).ids) == reference.prompt_ids


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
async def test_a_prompt_alone_is_continued_as_in_transformers(gateway: Gateway, reference: Reference) -> None:
    answer = await continuation(gateway, reference, cache_salt=f"alone {reference.name}")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert_agreement([reference], [answer])


async def test_twenty_prompts_at_once_are_continued_as_in_transformers(gateway: Gateway) -> None:
    answers = await all_at_once(gateway, REFERENCES, cache_salt="at once")
    assert all(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for answer in answers if answer["usage"]["prompt_tokens"] < 200
    )
    assert_agreement(REFERENCES, answers)


async def test_prompts_with_a_warm_prefix_cache_are_continued_as_in_transformers(gateway: Gateway) -> None:
    await all_at_once(gateway, REFERENCES, cache_salt="warm", max_tokens=1)
    answers = await all_at_once(gateway, REFERENCES, cache_salt="warm")
    for reference, answer in zip(REFERENCES, answers, strict=True):
        whole_blocks_before_the_last_token = (len(reference.prompt_ids) - 1) // 16 * 16
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks_before_the_last_token
    assert_agreement(REFERENCES, answers)
