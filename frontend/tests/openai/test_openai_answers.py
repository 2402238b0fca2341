"""Answers over HTTP against scripted tokens: shapes, usage, echo, logprobs, stops, many choices."""

import json
import math

import httpx
from trivet_proto.packing import unpack_i32

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
CAPITAL = "The capital of France is"
CAPITAL_IDS = [504, 3575, 282, 4649, 314]


async def whole(http: httpx.AsyncClient, path: str, **body: object) -> dict:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.content, parse_constant=_refuse_constant)


async def chunks(http: httpx.AsyncClient, path: str, **body: object) -> list[dict]:
    """Every event of a stream; the last line must be the end mark."""
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:], parse_constant=_refuse_constant) for line in lines[:-1]]


def _refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def text_of(events: list[dict], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finishes(events: list[dict]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]


async def test_a_chat_answer_has_the_fields_of_the_api(http) -> None:
    answer = await whole(http, CHAT, messages=HELLO, max_tokens=4)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "SmolLM2-135M-Instruct"
    assert answer["system_fingerprint"]
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (31, 4, 35)


async def test_the_same_prompt_twice_shows_cached_tokens(http) -> None:
    first = await whole(http, COMPLETIONS, prompt="a prompt", max_tokens=1)
    second = await whole(http, COMPLETIONS, prompt="a prompt", max_tokens=1)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_streamed_and_whole_text_are_equal_and_events_come_in_order(http) -> None:
    answer = await whole(http, CHAT, messages=HELLO, max_tokens=12)
    events = await chunks(http, CHAT, messages=HELLO, max_tokens=12, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == answer["choices"][0]["message"]["content"]
    assert finishes(events) == ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


async def test_usage_is_absent_unless_asked_for_and_runs_along_when_asked(http) -> None:
    assert all("usage" not in event for event in await chunks(http, COMPLETIONS, prompt="Hi", max_tokens=3))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await chunks(http, COMPLETIONS, prompt="Hi", max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert len(counts) >= 2


async def test_echo_with_no_tokens_gives_the_prompt_and_its_logprobs(http, scheduler) -> None:
    for prompt in (CAPITAL, CAPITAL_IDS):
        answer = await whole(http, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (CAPITAL, "length")
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 0
        block = choice["logprobs"]
        assert block["tokens"] == ["The", " capital", " of", " France", " is"]
        assert block["token_logprobs"][0] is None
        assert block["top_logprobs"][0] is None
        assert all(math.isfinite(value) and value <= 0 for value in block["token_logprobs"][1:])
        assert block["text_offset"] == [0, 3, 11, 14, 21]
    events = await chunks(http, COMPLETIONS, prompt=CAPITAL, echo=True, max_tokens=0, logprobs=1)
    assert text_of(events) == CAPITAL
    assert finishes(events) == ["length"]
    assert {add.sampling.max_tokens for add in scheduler.adds} == {0}


async def test_echo_without_logprobs_needs_no_engine(http, scheduler) -> None:
    answer = await whole(http, COMPLETIONS, prompt=CAPITAL, echo=True, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (CAPITAL, None)
    assert answer["usage"]["prompt_tokens"] == 5
    answer = await whole(http, COMPLETIONS, prompt=CAPITAL, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert text_of(await chunks(http, COMPLETIONS, prompt=CAPITAL, echo=True, max_tokens=0)) == CAPITAL
    assert scheduler.adds == []


async def test_echo_with_tokens_puts_the_prompt_before_them(http) -> None:
    plain = await whole(http, COMPLETIONS, prompt=CAPITAL, max_tokens=3, logprobs=2)
    echoed = await whole(http, COMPLETIONS, prompt=CAPITAL, max_tokens=3, logprobs=2, echo=True)
    assert echoed["choices"][0]["text"] == CAPITAL + plain["choices"][0]["text"]
    block = echoed["choices"][0]["logprobs"]
    assert len(block["tokens"]) == 8
    assert block["tokens"][5:] == plain["choices"][0]["logprobs"]["tokens"]
    assert "".join(block["tokens"]) == echoed["choices"][0]["text"]
    assert [len("".join(block["tokens"][:place])) for place in range(8)] == block["text_offset"]
    events = await chunks(http, COMPLETIONS, prompt=CAPITAL, max_tokens=3, logprobs=2, echo=True)
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert [offset for block in streamed for offset in block["text_offset"]] == block["text_offset"]


async def test_chat_logprobs_have_the_chosen_token_and_the_top(http) -> None:
    answer = await whole(http, CHAT, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=5)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [5, 5, 5]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in content)
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    answer = await whole(http, CHAT, messages=HELLO, max_tokens=3, logprobs=True)
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_prompt_logprobs_have_one_entry_per_prompt_token(http) -> None:
    answer = await whole(http, COMPLETIONS, prompt=CAPITAL, max_tokens=1, prompt_logprobs=2)
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == 5
    assert rows[1]["3575"] == {"logprob": -0.5, "rank": 1, "decoded_token": " capital"}
    answer = await whole(http, CHAT, messages=HELLO, max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == 31


async def test_several_prompts_and_choices_are_numbered_prompt_major(http, scheduler) -> None:
    answer = await whole(http, COMPLETIONS, prompt=["one", [1, 2, 3]], n=2, max_tokens=3, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [(await whole(http, COMPLETIONS, prompt=prompt, max_tokens=3))["choices"][0]["text"] for prompt in ("one", [1, 2, 3])]
    assert [answer["choices"][0]["text"], answer["choices"][2]["text"]] == alone
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 3 + len(unpack_i32(scheduler.adds[0].prompt_token_ids))
    assert scheduler.adds[0].seed == 5
    events = await chunks(http, COMPLETIONS, prompt=["one", [1, 2, 3]], n=2, max_tokens=3, seed=5)
    assert [text_of(events, index) for index in range(4)] == [choice["text"] for choice in answer["choices"]]


async def test_a_seed_is_drawn_when_none_is_given_and_minus_one_is_one(http, scheduler) -> None:
    for seed in (None, None, 0, -1):
        await whole(http, COMPLETIONS, prompt="x", max_tokens=1, seed=seed)
    drawn, again, zero, minus_one = (add.seed for add in scheduler.adds)
    assert drawn != again
    assert (zero, minus_one) == (0, 2**64 - 1)


STOPS = [
    ("DE", "", "DE"),
    ("DEFGHIJ", "", "DEFGHIJ"),
    ("EFG", "D", "DEFG"),
    (["ZZ", "GHI"], "DEF", "DEFGHI"),
]


async def test_stop_strings_cut_inside_tokens_and_tell_the_engine(http, scheduler) -> None:
    scheduler.script = lambda add, index: [33203, 23960, 57, 58, 1000, 1001, 1002]
    scheduler.pause_after = 6  # without a stop the request would not end
    for stop, without, included in STOPS:
        for include in (False, True):
            body = {"prompt": "x", "max_tokens": 64, "stop": stop, "include_stop_str_in_output": include}
            answer = await whole(http, COMPLETIONS, **body)
            [choice] = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (included if include else without, "stop")
            assert choice["stop_reason"] == (stop if isinstance(stop, str) else "GHI")
            events = await chunks(http, COMPLETIONS, **body)
            assert text_of(events) == choice["text"]
            assert finishes(events) == ["stop"]
    await scheduler.until(lambda: len(scheduler.stopped) == 16)
    # As many tokens count as it took to complete the stop string.
    assert [count for _, count in scheduler.stopped] == [1] * 4 + [4] * 4 + [2] * 4 + [3] * 4


async def test_no_stop_is_no_stop(http) -> None:
    for stop in (None, []):
        answer = await whole(http, COMPLETIONS, prompt="x", max_tokens=2, stop=stop)
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_end_token_gives_no_text_and_counts(http, scheduler) -> None:
    scheduler.script = lambda add, index: [33203, 2, 1000]
    answer = await whole(http, COMPLETIONS, prompt="x", max_tokens=5)
    assert answer["choices"][0]["text"] == "DEF"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 2


async def test_token_ids_come_when_asked_for(http) -> None:
    answer = await whole(http, COMPLETIONS, prompt=CAPITAL, max_tokens=2, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == CAPITAL_IDS
    assert len(choice["token_ids"]) == 2
    events = await chunks(http, COMPLETIONS, prompt=CAPITAL, max_tokens=2, return_token_ids=True)
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == choice["token_ids"]


async def test_the_prompts_own_words_never_come_back(http, scheduler) -> None:
    # The prompt ends inside a character; 131 is its missing byte.
    for forced in (None, {"131": 100}):
        body = {"prompt": [19556, 905, 15107, 230], "max_tokens": 8, "logit_bias": forced}
        answer = await whole(http, COMPLETIONS, **body)
        events = await chunks(http, COMPLETIONS, **body)
        assert "Hello" not in answer["choices"][0]["text"]
        assert text_of(events) == answer["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == 4


async def test_half_characters_are_never_streamed(http, scheduler) -> None:
    scheduler.script = lambda add, index: [10813, 235, 229, 143, 233]
    events = await chunks(http, COMPLETIONS, prompt="x", max_tokens=5)
    assert text_of(events) == "\N{WAVING HAND SIGN}ď"
    assert all("�" not in choice["text"] for event in events for choice in event["choices"])
    body = {"prompt": "x", "max_tokens": 2}
    assert text_of(await chunks(http, COMPLETIONS, **body)) == (await whole(http, COMPLETIONS, **body))["choices"][0]["text"]


async def test_assistant_turns_without_content_and_parts_render_alike(http, scheduler) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"cut": "off'}}
    for content in (None, [], "absent"):
        assistant = {"role": "assistant", "tool_calls": [call]} | ({} if content == "absent" else {"content": content})
        messages = [*HELLO, assistant, {"role": "tool", "tool_call_id": "c", "content": "42"}, {"role": "user", "content": "and?"}]
        await whole(http, CHAT, messages=messages, max_tokens=1)
    assert len({add.prompt_token_ids for add in scheduler.adds}) == 1
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert (await whole(http, CHAT, messages=parts, max_tokens=1))["usage"]["prompt_tokens"] == 31


async def test_a_final_message_is_continued_and_echoed_when_asked(http, scheduler) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    body = {"messages": messages, "max_tokens": 2, "add_generation_prompt": False, "continue_final_message": True}
    plain = await whole(http, CHAT, **body)
    echoed = await whole(http, CHAT, **body, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "The answer is" + plain["choices"][0]["message"]["content"]
    prompt = (await whole(http, "/detokenize", tokens=unpack_i32(scheduler.adds[0].prompt_token_ids).tolist()))["prompt"]
    assert prompt.endswith("The answer is")
    refused = await http.post(CHAT, json=body | {"add_generation_prompt": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_a_request_brings_its_own_template_only_where_that_is_allowed(http, start_frontend) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "chat_template": "{{ messages[0].content }}{{ tail }}",
        "chat_template_kwargs": {"tail": "!"},
    }
    refused = await http.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    async with start_frontend(trust_request_chat_template=True) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as other:
        assert (await whole(other, CHAT, **body))["usage"]["prompt_tokens"] == 2
        refused = await other.post(CHAT, json=body | {"chat_template": "{{ raise_exception('not so') }}"})
        assert refused.status_code == 400
        assert "not so" in refused.json()["error"]["message"]


async def test_messages_that_are_wrong_name_their_place(http) -> None:
    wrong = [{"role": "wizard", "content": "x"}, {"role": "user", "content": 5}, {"role": "user", "content": {"a": 1}}, "text", 7]
    wrong.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]})
    wrong.append({"role": "user", "content": [{"type": "mystery"}]})
    for message in wrong:
        answer = await http.post(CHAT, json={"messages": [*HELLO, message], "max_tokens": 1})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "1" in f"{error['message']} {error['param']}"
        assert error["param"].startswith("messages")


async def test_tokenize_and_detokenize_go_there_and_back(http) -> None:
    answer = await whole(http, "/tokenize", prompt=CAPITAL, return_token_strs=True)
    assert (answer["count"], answer["max_model_len"], answer["tokens"]) == (5, 8192, CAPITAL_IDS)
    assert answer["token_strs"] == ["The", " capital", " of", " France", " is"]
    assert (await whole(http, "/tokenize", messages=HELLO))["count"] == 31
    assert (await whole(http, "/detokenize", tokens=CAPITAL_IDS))["prompt"] == CAPITAL
    for tokens in ([49152], [-1]):
        refused = await http.post("/detokenize", json={"tokens": tokens})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_models_are_listed_and_shown(http) -> None:
    listed = (await http.get("/v1/models")).json()
    [model] = listed["data"]
    assert (listed["object"], model["id"], model["max_model_len"]) == ("list", "SmolLM2-135M-Instruct", 8192)
    assert (await http.get("/v1/models/SmolLM2-135M-Instruct")).json() == model
