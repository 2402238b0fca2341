"""Every call of both clients against a real frontend: what comes back, and in which types."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from trivet_client import (
    Finished,
    Message,
    NotServedError,
    PromptLogprobs,
    SamplingParams,
    Started,
    TextDelta,
    Tool,
    ToolCall,
    collect,
)
from trivet_proto.packing import unpack_i32

CAPITAL = "The capital of France is"
CAPITAL_IDS = (504, 3575, 282, 4649, 314)


async def test_a_chat_is_answered_whole(side) -> None:
    answer = await side.call("chat", "Hello", SamplingParams(max_tokens=5))
    assert answer.model == "SmolLM2-135M-Instruct"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 5)
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", "")
    assert answer.text == choice.text != ""
    assert choice.token_ids == choice.logprobs == ()
    assert answer.request_id


async def test_a_stream_has_the_same_text_event_by_event(side) -> None:
    sampling = SamplingParams(max_tokens=8)
    events = await side.read(side.client.stream_chat("Hello", sampling))
    assert isinstance(events[0], Started)
    assert events[0].prompt_tokens == 31
    assert isinstance(events[-1], Finished)
    texts = [event for event in events[1:-1] if isinstance(event, TextDelta)]
    assert len(texts) == len(events) - 2 > 2
    answer = await side.call("chat", "Hello", sampling)
    assert "".join(event.text for event in texts) == answer.text
    assert collect(events).choices == answer.choices


async def test_messages_may_be_text_dicts_or_typed(side, backend) -> None:
    one = SamplingParams(max_tokens=1)
    for messages in (
        "Hello",
        [{"role": "user", "content": "Hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        [Message("user", "Hello")],
    ):
        await side.call("chat", messages, one)
    assert len({add.prompt_token_ids for add in backend.scheduler.adds}) == 1
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages in (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        [
            Message("user", "Hi"),
            Message("assistant", tool_calls=[ToolCall("a", "f", "{}")]),
            Message("tool", "1", tool_call_id="a"),
        ],
    ):
        await side.call("chat", messages, one)
    assert len({add.prompt_token_ids for add in backend.scheduler.adds}) == 2


async def test_tools_reach_the_template_from_dicts_and_typed(side) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    typed = Tool("weather", "says the weather", schema, strict=True)
    plain = {"type": "function", "function": {"name": "weather", "description": "says the weather", "parameters": schema, "strict": True}}
    with_typed = await side.call("tokenize_chat", "Hello", tools=[typed])
    with_plain = await side.call("tokenize_chat", "Hello", tools=[plain])
    assert with_typed == with_plain


async def test_completion_takes_text_and_ids_alike(side) -> None:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=2, return_token_ids=True)
    from_text = await side.call("complete", CAPITAL, sampling, echo=True)
    from_ids = await side.call("complete", CAPITAL_IDS, sampling, echo=True)
    assert from_text.choices == from_ids.choices
    assert from_text.text.startswith(CAPITAL)
    assert tuple(row.token_id for row in from_text.prompt_logprobs) == CAPITAL_IDS[1:]
    [choice] = from_text.choices
    generated = [row for row in choice.logprobs if row.token_id in choice.token_ids]
    assert len(choice.token_ids) >= 3
    assert [(row.rank, len(row.top)) for row in generated[-3:]] == [(1, 2)] * 3
    assert all(row.logprob <= 0 and isinstance(row.token_bytes, bytes) for row in generated)


async def test_a_long_prompts_logprobs_come_in_pieces_and_whole(side) -> None:
    prompt = [1000 + index for index in range(1100)]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    events = await side.read(side.client.stream_complete(prompt, sampling))
    pieces = [event for event in events if isinstance(event, PromptLogprobs)]
    assert len(pieces) > 1
    answer = await side.call("complete", prompt, sampling)
    assert [row.token_id for row in answer.prompt_logprobs] == prompt[1:]


async def test_each_of_n_choices_is_complete(side) -> None:
    answer = await side.call("chat", "Hello", SamplingParams(max_tokens=4, n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 12)


async def test_every_sampling_field_reaches_the_scheduler(side, backend) -> None:
    sampling = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=9,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=2**64 - 1,
        stop="zebra",
        stop_token_ids=[77],
        ignore_eos=True,
        logit_bias={5: -3.0, "6": 2.0},
        bad_words=["bad"],
        allowed_token_ids=range(1000, 7000),
        logprobs=3,
        prompt_logprobs=1,
        priority=4,
        cache_salt="salt",
    )
    await side.call("chat", "Hello", sampling, request_id="mine")
    [add] = backend.scheduler.adds
    sent = add.sampling
    assert (sent.max_tokens, sent.min_tokens, sent.top_k, sent.logprobs, sent.prompt_logprobs) == (7, 2, 9, 3, 1)
    assert (sent.temperature, sent.top_p, sent.min_p) == (0.5, 0.75, 0.25)
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (1, -1, 1.5)
    assert unpack_i32(sent.logit_bias_ids).tolist() == [5, 6]
    assert len(unpack_i32(sent.allowed_token_ids)) == 6000
    assert 77 in unpack_i32(sent.stop_token_ids)
    assert sent.ignore_eos
    assert sent.bad_words_ids
    assert (add.seed, add.priority, add.cache_salt) == (2**64 - 1, 4, "salt")


async def test_a_stop_text_ends_the_answer_and_is_named(side) -> None:
    whole = await side.call("chat", "Hello", SamplingParams(max_tokens=12))
    stop = whole.text[6:9]
    answer = await side.call("chat", "Hello", SamplingParams(max_tokens=12, stop=[stop]))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


async def test_tokens_there_and_back(side) -> None:
    tokens = await side.call("tokenize", CAPITAL, with_texts=True)
    assert tokens.ids == CAPITAL_IDS
    assert tokens.texts == ("The", " capital", " of", " France", " is")
    assert tokens.max_model_len == 8192
    assert (await side.call("tokenize", CAPITAL)).texts == ()
    assert await side.call("detokenize", tokens.ids) == CAPITAL
    assert len((await side.call("tokenize_chat", "Hello")).ids) == 31
    assert len((await side.call("tokenize_chat", "Hello", add_generation_prompt=False)).ids) < 31


@pytest.mark.parametrize("text", ["héllo wörld", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "\u202eright to left\u202c", "a\x00b"])
async def test_any_text_survives_the_way(side, text: str) -> None:
    tokens = await side.call("tokenize", text)
    assert await side.call("detokenize", tokens.ids) == text
    answer = await side.call("complete", text, SamplingParams(max_tokens=1), echo=True)
    assert answer.text.startswith(text)


async def test_half_a_character_is_never_an_event(side, backend) -> None:
    ids = (await side.call("tokenize", "日本語👩‍👧")).ids
    backend.do(lambda: setattr(backend.scheduler, "script", lambda add, index: list(ids)))
    events = await side.read(side.client.stream_chat("Hello", SamplingParams(max_tokens=len(ids))))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "日本語👩‍👧"
    assert not any("\ufffd" in event.text for event in events if isinstance(event, TextDelta))


async def test_models_are_listed_and_found(side) -> None:
    [model] = await side.call("models")
    assert (model.name, model.max_model_len, model.vocab_size) == ("SmolLM2-135M-Instruct", 8192, 49152)
    assert model.tasks == ("generate",)
    assert await side.call("model") == await side.call("model", model.name) == model


async def test_a_model_without_vectors_says_so(side) -> None:
    for inputs in (["text"], [[1, 2]]):
        with pytest.raises(NotServedError, match="does not serve embed") as caught:
            await side.call("embed", inputs)
        assert caught.value.param == "model"


def test_threads_share_a_client_and_get_their_own_answers(client, backend) -> None:
    def ask(number: int) -> str:
        return client.complete([1000 + number], SamplingParams(max_tokens=4)).text

    alone = [ask(number) for number in range(24)]
    assert len(set(alone)) == 24
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, range(24))) == alone
