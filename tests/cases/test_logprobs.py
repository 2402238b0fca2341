"""Log probabilities are finite JSON, and those of a prompt are right whatever the prefix cache holds."""

from typing import Any

import pytest

from tests.gateway import Gateway, calling, together

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The capital of France is"
FLOOR = -9999.0
LENGTHS = (15, 16, 17, 31, 32, 33, 64)
STORY = "Every morning the ferry left the north quay with bread, letters and one goat, and every evening it came back with nets. " * 4


# Finite log probabilities; the parser of `Gateway` refuses NaN and the infinities in every answer


def assert_finite(values: list[float | None]) -> None:
    assert values
    assert all(value is None or FLOOR <= value <= 0 for value in values)


async def test_logprobs_of_an_echo_under_top_k_are_finite(gateway: Gateway) -> None:
    answer = await gateway.complete(PROMPT, echo=True, logprobs=1, temperature=1, top_k=1, max_tokens=8)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 13
    assert logprobs["token_logprobs"][0] is None
    assert_finite(logprobs["token_logprobs"])
    assert all(value > FLOOR for value in logprobs["token_logprobs"][1:])
    assert_finite([value for top in logprobs["top_logprobs"] if top for value in top.values()])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.01, "top_logprobs": 5},
        {"temperature": 1, "top_p": 0.01, "top_logprobs": 20, "seed": 1},
        {"allowed_token_ids": [7042, 198], "top_logprobs": 20},
    ],
    ids=["cold", "narrow", "two tokens"],
)
async def test_logprobs_of_a_conversation_are_finite(gateway: Gateway, fields: dict[str, Any]) -> None:
    answer = await gateway.chat("What is the capital of France?", logprobs=True, max_tokens=8, **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert_finite([entry["logprob"] for entry in content])
    assert all(entry["logprob"] > FLOOR for entry in content)
    assert all(len(entry["top_logprobs"]) == fields["top_logprobs"] for entry in content)
    assert_finite([top["logprob"] for entry in content for top in entry["top_logprobs"]])


async def test_logprobs_of_a_constrained_answer_are_finite_or_the_constraint_is_refused(gateway: Gateway) -> None:
    constraint = {"structured_outputs": {"choice": ["positive", "negative"]}, "logprobs": True, "top_logprobs": 5, "max_tokens": 8}
    response = await gateway.post(CHAT, {"messages": [{"role": "user", "content": "I love it."}], **constraint})
    if response.status_code == 200:
        assert response.json()["choices"][0]["message"]["content"] in ("positive", "negative")
    else:
        assert response.status_code == 400
        assert "structured_outputs" in response.json()["error"]["message"]


async def test_the_logprob_of_a_token_that_a_bias_forbids_is_finite(gateway: Gateway) -> None:
    usual = await gateway.chat("Hello", logprobs=True, max_tokens=1, return_token_ids=True)
    forbidden = usual["choices"][0]["token_ids"][0]
    answer = await gateway.chat(
        "Hello", logprobs=True, top_logprobs=20, max_tokens=4, logit_bias={str(forbidden): -100}, return_token_ids=True
    )
    assert forbidden not in answer["choices"][0]["token_ids"]
    content = answer["choices"][0]["logprobs"]["content"]
    assert_finite([top["logprob"] for entry in content for top in entry["top_logprobs"]])
    assert all(entry["logprob"] > FLOOR for entry in content)


async def test_logprobs_without_alternatives_have_empty_lists(gateway: Gateway) -> None:
    answer = await gateway.chat("Hello", logprobs=True, max_tokens=4)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 5}], ids=repr
)
async def test_alternatives_out_of_range_or_without_logprobs_are_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    refusal = await gateway.refusal(CHAT, {"messages": [{"role": "user", "content": "Hello"}], **fields})
    assert (refusal.status, refusal.param) == (400, "top_logprobs")


@pytest.mark.parametrize(("field", "value"), [("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", -2)])
async def test_a_completions_number_of_alternatives_out_of_range_is_refused(gateway: Gateway, field: str, value: int) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PROMPT, field: value})
    assert (refusal.status, refusal.param) == (400, field)


async def test_streamed_logprobs_equal_those_of_the_whole_answer(gateway: Gateway) -> None:
    whole = await gateway.chat("Hello", logprobs=True, top_logprobs=3, max_tokens=8)
    chunks = await gateway.stream_chat("Hello", logprobs=True, top_logprobs=3, max_tokens=8)
    streamed = [
        entry for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs") for entry in choice["logprobs"]["content"]
    ]
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in content], abs=1e-4)


# Prompt log probabilities and the prefix cache


def prompt_values(answer: Any, prompt: list[int]) -> list[float]:
    """The logprob of each prompt token but the first."""
    entries = answer["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(prompt)
    assert entries[0] is None
    return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], prompt[1:], strict=True)]


def likeliest(answer: Any) -> list[str]:
    """The most probable id at each place of the prompt but the first."""
    return [max(entry, key=lambda token: entry[token]["logprob"]) for entry in answer["choices"][0]["prompt_logprobs"][1:]]


@pytest.mark.parametrize("length", LENGTHS)
async def test_prompt_logprobs_are_the_same_with_a_cold_and_a_warm_cache_and_in_chunks(gateway: Gateway, in_twos: str, length: int) -> None:
    prompt = (await gateway.tokenize(STORY))[:length]
    uncached = await gateway.complete(prompt, prompt_logprobs=1, max_tokens=1, cache_salt=f"prompt logprobs {length}")
    async with calling(in_twos) as chunked:
        sends = [await chunked.complete(prompt, prompt_logprobs=1, max_tokens=1) for _ in range(2)]
    for answer in sends:
        assert prompt_values(answer, prompt) == pytest.approx(prompt_values(uncached, prompt), abs=1e-4)
        assert likeliest(answer) == likeliest(uncached)
        assert answer["choices"][0]["text"] == uncached["choices"][0]["text"]


@pytest.mark.parametrize("length", LENGTHS)
async def test_an_echo_with_logprobs_is_the_same_with_a_cold_and_a_warm_cache_and_in_chunks(
    gateway: Gateway, in_twos: str, length: int
) -> None:
    prompt = (await gateway.tokenize(STORY))[:length]
    wishes = {"echo": True, "logprobs": 1, "max_tokens": 1}
    uncached = await gateway.complete(prompt, cache_salt=f"echo {length}", **wishes)
    wanted = uncached["choices"][0]["logprobs"]
    assert len(wanted["token_logprobs"]) == length + 1
    async with calling(in_twos) as chunked:
        sends = [await chunked.complete(prompt, cache_salt=f"echo {length}", **wishes) for _ in range(2)]
    for answer in sends:
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == wanted["tokens"]
        assert logprobs["text_offset"] == wanted["text_offset"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(wanted["token_logprobs"][1:], abs=1e-4)


async def test_a_prompt_with_logprobs_fills_the_cache_for_requests_without(in_twos: str) -> None:
    async with calling(in_twos) as chunked:
        prompt = (await chunked.tokenize(STORY))[:64]
        await together(*(chunked.complete(prompt, prompt_logprobs=1, max_tokens=1, cache_salt="fill") for _ in range(2)))
        plain = await chunked.complete(prompt, max_tokens=1, cache_salt="fill")
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        await chunked.still_answers()
