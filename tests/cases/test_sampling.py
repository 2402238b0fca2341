"""What is sampled is what was asked for, whoever else is in the batch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import deployed
from tests.forcing import PROMPT, forcing
from tests.gateway import Gateway, calling, ids_of, together

COMPLETIONS = "/v1/completions"
PARIS = "The capital of France is"
TINY = (1e-4, 1e-5, 1e-6, 1e-12, 5e-324)
PENALISED: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "references" / "penalised.json").read_text())
SPECIAL = set(range(17))


# Tiny temperatures


async def test_a_tiny_temperature_or_top_p_is_greedy_alone_and_beside_a_random_request(gateway: Gateway) -> None:
    await tiny_equals_greedy(gateway)


@pytest.mark.long
async def test_a_tiny_temperature_or_top_p_is_greedy_in_half_precision() -> None:
    async with deployed(dtype="bfloat16") as deployment, calling(deployment.base_url) as half:
        await tiny_equals_greedy(half)


async def tiny_equals_greedy(gateway: Gateway) -> None:
    wishes: dict[str, Any] = {"max_tokens": 16, "return_token_ids": True}
    random_wishes = wishes | {"temperature": 1, "seed": 5, "ignore_eos": True}
    greedy = ids_of(await gateway.complete(PARIS, **wishes))
    random_alone = ids_of(await gateway.complete(PARIS, **random_wishes))
    assert not set(greedy) <= SPECIAL
    for fields in [{"temperature": value} for value in TINY] + [{"temperature": 1, "top_p": 1e-4}]:
        assert ids_of(await gateway.complete(PARIS, **wishes | fields)) == greedy, fields
    random_beside, narrow, barely_warm, *tiny = await together(
        gateway.complete(PARIS, **random_wishes),
        gateway.complete(PARIS, **wishes | {"temperature": 1, "top_p": 1e-4}),
        gateway.complete(PARIS, **wishes | {"temperature": 1e-3}),
        *(gateway.complete(PARIS, **wishes | {"temperature": value}) for value in TINY),
    )
    assert ids_of(random_beside) == random_alone
    assert ids_of(narrow) == greedy
    assert not set(ids_of(barely_warm)) <= SPECIAL
    assert [ids_of(answer) for answer in tiny] == [greedy] * len(TINY)


@pytest.mark.parametrize("temperature", ["-0.1", "NaN", "Infinity", "1e999", "2.1", '"hot"'])
async def test_a_temperature_that_is_negative_or_no_number_is_refused(gateway: Gateway, temperature: str) -> None:
    body = f'{{"prompt": "x", "temperature": {temperature}}}'
    response = await gateway.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


# Penalties


async def penalised(gateway: Gateway, record: dict[str, Any]) -> list[int]:
    fields = record["penalties"] | {"max_tokens": len(record["output_ids"]), "ignore_eos": True, "return_token_ids": True}
    return ids_of(await gateway.complete(record["prompt_ids"], **fields))


async def test_penalties_give_the_ids_of_the_reference(gateway: Gateway) -> None:
    alone = [await penalised(gateway, record) for record in PENALISED]
    batch = await together(*(penalised(gateway, record) for record in PENALISED))
    wanted = [record["output_ids"] for record in PENALISED]
    assert alone == wanted
    assert batch == wanted


async def test_penalties_give_the_ids_of_the_reference_when_the_prompt_comes_in_chunks_of_two(in_twos: str) -> None:
    async with calling(in_twos) as chunked:
        for record in PENALISED:
            assert await penalised(chunked, record) == record["output_ids"]


async def test_presence_leaves_the_first_token_alone_and_repetition_sees_the_prompt(gateway: Gateway) -> None:
    wishes: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True, "allowed_token_ids": [7042, 25]}
    prompt = [38634, 7042, 7042]
    plain, present, frequent, repeated = await together(
        gateway.complete(prompt, logit_bias={"7042": 60}, **wishes),
        gateway.complete(prompt, logit_bias={"7042": 60}, presence_penalty=2.0, **wishes),
        gateway.complete(prompt, logit_bias={"7042": 60}, frequency_penalty=2.0, **wishes),
        gateway.complete(prompt, logit_bias={"7042": 60}, repetition_penalty=100, **wishes),
    )
    assert ids_of(plain) == ids_of(present) == ids_of(frequent) == [7042]
    assert ids_of(repeated) == [25]


async def test_a_hit_in_the_prefix_cache_changes_no_penalty(gateway: Gateway) -> None:
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "max_tokens": 24, "return_token_ids": True, "cache_salt": "penalty"}
    prompt = "The rain in the harbour falls on the boats and on the nets and on the men who mend the nets, and the rain in the harbour"
    cold = await gateway.complete(prompt, **fields)
    warm = await gateway.complete(prompt, **fields)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert ids_of(warm) == ids_of(cold)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "much"),
    ],
)
async def test_a_penalty_out_of_range_is_refused(gateway: Gateway, field: str, value: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PARIS, field: value})
    assert (refusal.status, refusal.param) == (400, field)


# Bad words

EXAGGERATED, SPACED_EXAGGERATED = [888, 12895, 483], 24098
DESCRIBED, SPACED_DESCRIBED = [12390, 7199], 3873


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_bad_word_with_a_leading_space_never_comes(gateway: Gateway, temperature: float) -> None:
    rigged = {"logit_bias": {str(SPACED_EXAGGERATED): 100, str(SPACED_DESCRIBED): 99}, "seed": 3, "ignore_eos": True}
    answer = await gateway.complete(
        PROMPT,
        bad_words=["exaggerated", "described"],
        temperature=temperature,
        max_tokens=200,
        return_token_ids=True,
        **rigged,
    )
    assert len(ids_of(answer)) == 200
    assert not {SPACED_EXAGGERATED, SPACED_DESCRIBED} & set(ids_of(answer))


async def test_of_a_bad_word_of_several_tokens_only_the_last_is_barred_and_only_in_its_place(gateway: Gateway) -> None:
    free = await gateway.complete(PROMPT, **forcing(EXAGGERATED))
    assert ids_of(free) == EXAGGERATED
    barred = ids_of(await gateway.complete(PROMPT, bad_words=["exaggerated"], **forcing(EXAGGERATED)))
    assert barred[:2] == EXAGGERATED[:2]
    assert barred[2] != EXAGGERATED[2]
    elsewhere = ids_of(await gateway.complete(PROMPT, bad_words=["exaggerated"], **forcing(EXAGGERATED[::-1])))
    assert elsewhere == EXAGGERATED[::-1]


async def test_the_beginning_of_a_bad_word_may_go_on_otherwise(gateway: Gateway) -> None:
    other = [DESCRIBED[0], 7042]
    assert ids_of(await gateway.complete(PROMPT, bad_words=["described"], **forcing(other))) == other


async def test_a_word_in_other_letters_is_another_word(gateway: Gateway) -> None:
    capital = await gateway.tokenize("Described")
    assert ids_of(await gateway.complete(PROMPT, bad_words=["described"], **forcing(capital))) == capital


@pytest.mark.parametrize("words", [[""], ["described", ""], "described", [7]], ids=repr)
async def test_bad_words_that_are_empty_or_no_list_of_texts_are_refused(gateway: Gateway, words: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PARIS, "bad_words": words})
    assert refusal.status == 400
    assert (refusal.param or "").startswith("bad_words")


async def test_a_request_that_leaves_no_token_fails_alone(gateway: Gateway) -> None:
    beside = asyncio.create_task(gateway.complete(PARIS, max_tokens=24, return_token_ids=True))
    refusal = await gateway.refusal(
        COMPLETIONS, {"prompt": PARIS, "allowed_token_ids": [SPACED_DESCRIBED], "bad_words": ["described"], "max_tokens": 4}
    )
    assert refusal.status in (400, 500)
    assert ids_of(await beside) == ids_of(await gateway.complete(PARIS, max_tokens=24, return_token_ids=True))


# Seeds; the part with a preemption is in `tests/test_preemption.py`

SEEDED = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
async def test_a_seeded_request_gives_the_same_ids_in_any_company(gateway: Gateway, top_p: float) -> None:
    def request(**fields: Any) -> Any:
        return gateway.complete(PARIS, top_p=top_p, **SEEDED | fields)

    alone = ids_of(await request(seed=42))
    assert ids_of(await request(seed=42)) == alone
    companies: list[list[dict[str, Any]]] = [
        [{"seed": 42}, {}],
        [{"seed": 42}, {"seed": 7}],
        [{}, {"seed": 42}],
        [{"seed": 42}, *({"seed": seed, "temperature": 0.1 * seed} for seed in range(4)), {}, {"temperature": 0}, {"max_tokens": 3}],
    ]
    for company in companies:
        answers = await together(*(request(**fields) for fields in company))
        assert ids_of(answers[company.index({"seed": 42})]) == alone, company


async def test_two_choices_of_one_seed_differ_and_repeat_and_the_first_is_that_of_a_single_choice(gateway: Gateway) -> None:
    single = await gateway.complete(PARIS, seed=42, **SEEDED)
    twice = [await gateway.complete(PARIS, seed=42, n=2, **SEEDED) for _ in range(2)]
    assert ids_of(twice[0], 0) == ids_of(single)
    assert ids_of(twice[0], 1) != ids_of(twice[0], 0)
    assert [ids_of(twice[1], index) for index in (0, 1)] == [ids_of(twice[0], index) for index in (0, 1)]


async def test_seed_zero_is_a_seed_and_no_seed_is_none(gateway: Gateway) -> None:
    zero, again, unseeded, another = await together(
        gateway.complete(PARIS, seed=0, **SEEDED),
        gateway.complete(PARIS, seed=0, **SEEDED),
        gateway.complete(PARIS, **SEEDED),
        gateway.complete(PARIS, **SEEDED),
    )
    assert ids_of(zero) == ids_of(again)
    assert ids_of(unseeded) != ids_of(another)


async def test_a_negative_seed_is_read_modulo_2_to_the_64(gateway: Gateway) -> None:
    negative, same = await together(gateway.complete(PARIS, seed=-1, **SEEDED), gateway.complete(PARIS, seed=2**64 - 1, **SEEDED))
    assert ids_of(negative) == ids_of(same)


@pytest.mark.parametrize("seed", ["x", 1.5, 2**64, -(2**63) - 1], ids=repr)
async def test_a_seed_that_is_no_64_bit_integer_is_refused(gateway: Gateway, seed: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PARIS, "seed": seed})
    assert (refusal.status, refusal.param) == (400, "seed")
