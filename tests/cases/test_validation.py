"""What the gateway takes and refuses at its edges; after each the server answers as ever."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.deployment import Deployment
from tests.gateway import Gateway, calling, finish_of, ids_of, text_of, together

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CONTEXT = 8192
PARIS = "The capital of France is"
PARIS_IDS = [504, 3575, 282, 4649, 314]


@pytest_asyncio.fixture(autouse=True)
async def still_serving(server: Deployment) -> AsyncIterator[None]:
    """Whatever a case sends, a plain request is served after it."""
    yield
    async with calling(server.base_url) as caller:
        await caller.still_answers()


# Empty prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [PARIS, ""], ["", PARIS], [PARIS_IDS, []]], ids=repr)
async def test_an_empty_prompt_is_refused_and_the_engine_lives(gateway: Gateway, prompt: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
    assert (refusal.status, refusal.type, refusal.param) == (400, "invalid_request_error", "prompt")


async def test_an_empty_prompt_leaves_nothing_queued(gateway: Gateway) -> None:
    await gateway.refusal(COMPLETIONS, {"prompt": [PARIS, ""], "max_tokens": 64})
    await gateway.idle(within=2)


# Content of messages

TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Oban"}'}}


def tool_loop(**assistant: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "When is high water?"},
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "call_1", "content": "At noon."},
        {"role": "user", "content": "Thank you. And low water?"},
    ]


async def prompt_of(gateway: Gateway, messages: list[dict[str, Any]]) -> list[int]:
    answer = await gateway.chat(messages, max_tokens=1, return_token_ids=True)
    return list(answer["prompt_token_ids"])


async def test_an_assistant_turn_with_a_tool_call_may_have_no_content_in_any_of_three_ways(gateway: Gateway) -> None:
    forms: list[dict[str, Any]] = [{"content": None}, {}, {"content": []}, {"content": ""}]
    prompts = await together(*(prompt_of(gateway, tool_loop(tool_calls=[TOOL_CALL], **form)) for form in forms))
    assert prompts[0]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]


async def test_one_text_part_is_the_same_prompt_as_the_string(gateway: Gateway) -> None:
    part = {"type": "text", "text": "Hello"}
    answer = await gateway.chat([{"role": "user", "content": [part]}], max_tokens=1, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == 31
    assert answer["prompt_token_ids"] == await prompt_of(gateway, [{"role": "user", "content": "Hello"}])


async def test_two_text_parts_are_joined_in_order(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    joined = await gateway.detokenize(await prompt_of(gateway, [{"role": "user", "content": parts}]))
    assert joined.index("first") < joined.index("second")
    swapped = await gateway.detokenize(await prompt_of(gateway, [{"role": "user", "content": parts[::-1]}]))
    assert swapped.index("second") < swapped.index("first")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "hologram", "hologram": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
        {"role": "user", "content": [{"text": "no type"}, 7]},
        {"role": "user", "content": 7},
        {"role": "user", "content": {"text": "Hello"}},
        {"role": "wizard", "content": "Hello"},
        {"role": None, "content": "Hello"},
        {"content": "Hello"},
        "Hello",
    ],
    ids=repr,
)
async def test_a_message_that_cannot_be_understood_is_refused_by_its_index(gateway: Gateway, message: Any) -> None:
    refusal = await gateway.refusal(CHAT, {"messages": [{"role": "system", "content": "S"}, message], "max_tokens": 1})
    assert refusal.status == 400
    assert "messages[1]" in f"{refusal.param} {refusal.message}"


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": "Hello"}], 31),
        ([{"role": "user", "content": ""}], 30),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}], 16),
        ([{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}], 15),
    ],
    ids=["user", "empty user", "system and user", "empty system and user"],
)
async def test_a_conversation_has_its_known_length(gateway: Gateway, messages: list[dict[str, Any]], tokens: int) -> None:
    assert (await gateway.chat(messages, max_tokens=1))["usage"]["prompt_tokens"] == tokens


async def test_a_conversation_without_messages_is_refused_but_can_be_tokenized(gateway: Gateway) -> None:
    refusal = await gateway.refusal(CHAT, {"messages": [], "max_tokens": 4})
    assert (refusal.status, refusal.param) == (400, "messages")
    assert (await gateway.answer("/tokenize", {"messages": []}))["count"] == 4


# Tool arguments in the history

ARGUMENTS = {
    "cut off": '{"port": "Ob',
    "inner quotes": '{"port": "the "old" quay"}',
    "array": "[1, 2]",
    "empty": "",
    "valid": '{"port": "Oban"}',
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
async def test_broken_tool_arguments_in_the_history_do_not_poison_the_conversation(gateway: Gateway, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": arguments}}
    messages = tool_loop(content=None, tool_calls=[call])
    whole, chunks = await together(gateway.chat(messages, max_tokens=8), gateway.stream_chat(messages, max_tokens=8))
    assert whole["choices"][0]["message"]["content"] == text_of(chunks)
    assert whole["usage"]["prompt_tokens"] == len(await prompt_of(gateway, tool_loop(content=None, tool_calls=[TOOL_CALL])))


# Logit_bias


@pytest.mark.parametrize(
    ("bias", "named"),
    [({"49152": 1}, "49152"), ({"-1": 1}, "-1"), ({"abc": 1}, "abc"), ({"5": 101}, "101")],
    ids=["past the end", "negative", "no number", "too large"],
)
async def test_a_logit_bias_that_is_wrong_is_refused_by_name_and_disturbs_nobody(
    gateway: Gateway, bias: dict[str, float], named: str
) -> None:
    alone = await gateway.chat("Hello", max_tokens=24)
    beside = asyncio.create_task(gateway.chat("Hello", max_tokens=24))
    refusal = await gateway.refusal(CHAT, {"messages": [{"role": "user", "content": "Hello"}], "logit_bias": bias})
    assert (refusal.status, refusal.param) == (400, "logit_bias")
    assert named in refusal.message
    assert (await beside)["choices"][0]["message"] == alone["choices"][0]["message"]


async def test_the_last_id_of_the_vocabulary_may_be_biased(gateway: Gateway) -> None:
    alone, biased = await together(gateway.chat("Hello", max_tokens=8), gateway.chat("Hello", max_tokens=8, logit_bias={"49151": -100}))
    assert biased["choices"][0]["message"] == alone["choices"][0]["message"]


async def test_the_greatest_bias_makes_a_token_every_token_and_the_least_makes_it_absent(gateway: Gateway) -> None:
    forced = await gateway.complete(PARIS, max_tokens=6, logit_bias={"7042": 100}, return_token_ids=True)
    assert ids_of(forced) == [7042] * 6
    banned = await gateway.complete(PARIS, max_tokens=12, logit_bias={"7042": -100}, return_token_ids=True)
    assert 7042 not in ids_of(banned)


# Echo


@pytest.mark.parametrize("prompt", [PARIS, PARIS_IDS], ids=["text", "ids"])
async def test_an_echo_without_new_tokens_is_the_prompt_and_nothing_else(gateway: Gateway, prompt: Any) -> None:
    answer = await gateway.complete(prompt, echo=True, max_tokens=0, logprobs=1)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == PARIS
    assert choice["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 5
    assert "".join(logprobs["tokens"]) == PARIS
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5
    assert all(-9999 < value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(value <= 0 for top in logprobs["top_logprobs"][1:] for value in top.values())


@pytest.mark.parametrize("prompt", [PARIS, PARIS_IDS], ids=["text", "ids"])
async def test_an_echo_without_logprobs_has_none_and_streams_to_the_same_text(gateway: Gateway, prompt: Any) -> None:
    whole, chunks = await together(
        gateway.complete(prompt, echo=True, max_tokens=0), gateway.stream_completion(prompt, echo=True, max_tokens=0)
    )
    assert whole["choices"][0]["text"] == text_of(chunks) == PARIS
    assert whole["choices"][0]["logprobs"] is None
    assert finish_of(chunks) == "length"


async def test_an_echo_comes_before_what_is_generated(gateway: Gateway) -> None:
    plain, echoed, chunks = await together(
        gateway.complete(PARIS, max_tokens=4, logprobs=1),
        gateway.complete(PARIS, max_tokens=4, echo=True, logprobs=1),
        gateway.stream_completion(PARIS, max_tokens=4, echo=True, logprobs=1),
    )
    assert echoed["choices"][0]["text"] == PARIS + plain["choices"][0]["text"] == text_of(chunks)
    assert len(echoed["choices"][0]["logprobs"]["tokens"]) == 9
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][5:] == pytest.approx(
        plain["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4
    )
    streamed = [token for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert streamed == echoed["choices"][0]["logprobs"]["tokens"]


async def test_no_tokens_without_echo_is_an_empty_text(gateway: Gateway) -> None:
    answer = await gateway.complete(PARIS, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


# The edge of the context


@pytest.mark.parametrize("max_tokens", [1, 2, None], ids=["1", "2", "unset"])
@pytest.mark.parametrize("prompt_tokens", [8192, 8193])
async def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths(
    gateway: Gateway, prompt_tokens: int, max_tokens: int | None
) -> None:
    body = {"prompt": [19556] * prompt_tokens} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    refusal = await gateway.refusal(COMPLETIONS, body)
    assert refusal.status == 400
    assert str(prompt_tokens) in refusal.message
    assert str(CONTEXT) in refusal.message
    assert not re.search(r"-\d", refusal.message), "a negative number"


async def test_a_text_that_is_too_long_is_refused_with_its_length_in_tokens(gateway: Gateway) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": "word " * 8200, "max_tokens": 1})
    assert refusal.status == 400
    assert "8201" in refusal.message
    assert str(CONTEXT) in refusal.message


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(8191, 2), (8190, 3), (8190, 10**12), (5, 8188)])
async def test_more_tokens_than_the_context_has_room_for_are_refused_not_shortened(
    gateway: Gateway, prompt_tokens: int, max_tokens: int
) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": [19556] * prompt_tokens, "max_tokens": max_tokens})
    assert (refusal.status, refusal.param) == (400, "max_tokens")
    assert str(prompt_tokens) in refusal.message
    assert str(CONTEXT) in refusal.message


@pytest.mark.long
async def test_a_prompt_that_leaves_room_for_one_token_gets_one(gateway: Gateway) -> None:
    answer = await gateway.complete([19556] * 8191, max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    unset = await gateway.complete([19556] * 8190)
    assert 1 <= unset["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize("value", [0, -1, 10**12, 1.5, "5", True], ids=repr)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_number_of_tokens_that_makes_no_sense_in_a_chat_is_refused(gateway: Gateway, field: str, value: Any) -> None:
    refusal = await gateway.refusal(CHAT, {"messages": [{"role": "user", "content": "Hello"}], field: value})
    assert (refusal.status, refusal.param) == (400, field)


@pytest.mark.parametrize("value", [-1, 10**12, 10**400, 1.5, "5", True], ids=["-1", "10**12", "10**400", "1.5", "text", "true"])
async def test_a_number_of_tokens_that_makes_no_sense_in_a_completion_is_refused(gateway: Gateway, value: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PARIS, "max_tokens": value})
    assert (refusal.status, refusal.param) == (400, "max_tokens")


# What is no request at all


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "7", '"text"', '{"prompt": "x"', "\x00", json.dumps({"prompt": "x"})[:-1] + ",}"], ids=repr
)
async def test_a_body_that_is_no_json_object_is_refused(gateway: Gateway, body: str) -> None:
    response = await gateway.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"model": "no-such-model", "prompt": PARIS})
    assert (refusal.status, refusal.code) == (404, "model_not_found")
