"""Bad requests: always 400 with the field's name in OpenAI's shape, and the next request is served."""

import json

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def refused(http: httpx.AsyncClient, path: str, body: object, param: str | None, status: int = 400) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert "Traceback" not in error["message"]
    return error["message"]


async def served(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 2})
    assert answer.status_code == 200, answer.text


async def test_empty_prompts_are_refused_and_leave_nothing_behind(http, scheduler) -> None:
    for prompt in ("", [""], [], [[]], ["good", ""], [[1], []]):
        await refused(http, COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, "prompt")
    assert scheduler.adds == []
    await served(http)


WRONG_PROMPTS = [5, None, {"a": 1}, True, [True], [1, "a"], [[1, 2.5]], [None], [49152], [-1], [[10**30]], ["a", 1]]


async def test_prompts_of_wrong_types_are_refused(http) -> None:
    for prompt in WRONG_PROMPTS:
        await refused(http, COMPLETIONS, {"prompt": prompt}, "prompt")


WRONG_FIELDS = [
    ("temperature", [-0.1, 2.1, "1", True, [1], 10**400]),
    ("top_p", [0, -0.1, 1.1, "x", False]),
    ("top_k", [-2, 1.5, "5", True, 10.0]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [2.1, -2.1, "1"]),
    ("frequency_penalty", [2.1, -2.1]),
    ("repetition_penalty", [0, -1, 101]),
    ("max_tokens", [-1, 10**12, 1.5, "5", True, 10**400]),
    ("min_tokens", [-1, 1.5, True]),
    ("n", [0, -1, 1.5, 129, True, "2"]),
    ("seed", ["x", 1.5, True, 2**64, -(2**63) - 1]),
    ("stop", ["", [""], ["a", ""], 5, [5], ["x"] * 65, {"a": 1}]),
    ("stop_token_ids", [[49152], [-1], ["a"], 5, [1.5], [True]]),
    ("logit_bias", [{"49152": 1}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": -101}, {"5": "x"}, {"5": True}, [5], {"1_0": 1}]),
    ("bad_words", [[""], "word", [5]]),
    ("allowed_token_ids", [[], [49152], [-1], ["a"]]),
    ("logits_processors_args", [[1], "x"]),
    ("prompt_logprobs", [21, -1, True, 1.5]),
    ("best_of", [2, 0]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("cache_salt", ["", 5]),
    ("priority", [2**31, 1.5]),
    ("response_format", [{"type": "json_object"}, {"type": "json_schema"}, "text", {"type": "xml"}, {}]),
    ("structured_outputs", [{"choice": ["a"]}]),
    ("stream", ["yes", 1]),
    ("metadata", [5, "x"]),
    ("user", [5]),
]


async def test_fields_out_of_range_or_of_wrong_type_are_named(http) -> None:
    for field, values in WRONG_FIELDS:
        for value in values:
            await refused(http, COMPLETIONS, {"prompt": "Hello", field: value}, field)
            await refused(http, CHAT, {"messages": HELLO, field: value}, field)
    await served(http)


async def test_chat_needs_room_for_an_answer(http) -> None:
    await refused(http, CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens")
    message = await refused(http, CHAT, {"messages": HELLO, "max_completion_tokens": -5}, "max_completion_tokens")
    assert "at least 1" in message


CONTRADICTIONS = [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": None}, "messages"),
]


async def test_chat_fields_that_contradict_are_named(http) -> None:
    for fields, param in CONTRADICTIONS:
        await refused(http, CHAT, {"messages": HELLO} | fields, param)


async def test_required_and_named_tools_say_that_they_are_not_served_yet(http) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        message = await refused(http, CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice}, "tool_choice")
        assert "not served yet" in message
    await refused(
        http, CHAT, {"messages": HELLO, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"
    )


async def test_completion_logprobs_have_a_limit(http) -> None:
    for value in (21, -1, True, "5"):
        await refused(http, COMPLETIONS, {"prompt": "Hello", "logprobs": value}, "logprobs")


async def test_what_is_required_is_named(http) -> None:
    await refused(http, CHAT, {}, "messages")
    await refused(http, COMPLETIONS, {}, "prompt")
    await refused(http, "/detokenize", {}, "tokens")
    await refused(http, "/tokenize", {}, "prompt")


NO_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'{"prompt": NaN}',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b"{" * 9999,
]


async def test_bodies_that_are_no_json_object_are_refused(http) -> None:
    for body in NO_OBJECTS:
        answer = await http.post(COMPLETIONS, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    await served(http)


async def test_deep_nesting_is_refused(http) -> None:
    await refused(http, CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None)


async def test_numbers_that_are_not_finite_are_refused(http) -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        answer = await http.post(COMPLETIONS, content=b'{"prompt": "Hello", "temperature": ' + text + b"}")
        assert answer.status_code == 400, answer.text


async def test_prompt_and_max_tokens_must_fit_the_context(http) -> None:
    def body(length: int, max_tokens: int | None) -> dict[str, object]:
        return {"prompt": [19556] * length} | ({} if max_tokens is None else {"max_tokens": max_tokens})

    answer = await http.post(COMPLETIONS, json=body(8191, 1))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    answer = await http.post(COMPLETIONS, json=body(8190, None))
    assert answer.json()["usage"]["completion_tokens"] == 2
    message = await refused(http, COMPLETIONS, body(8191, 2), "max_tokens")
    assert "8191" in message
    assert "8192" in message
    for length in (8192, 8193):
        for max_tokens in (1, 2, None):
            message = await refused(http, COMPLETIONS, body(length, max_tokens), "prompt")
            assert str(length) in message
            assert "8192" in message
            assert "-" not in message
    message = await refused(http, COMPLETIONS, {"prompt": "word " * 8200}, "prompt")
    assert "8201" in message
    await served(http)


async def test_unknown_models_paths_and_methods_have_openai_shape(http) -> None:
    answer = await http.post(CHAT, json={"model": "gpt-x", "messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = await http.get("/v1/models/none/such")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = await http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = await http.get(CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"]


async def test_a_body_over_the_limit_is_413_and_names_the_limit(start_frontend) -> None:
    async with start_frontend(max_body_bytes=4096) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        body = json.dumps({"prompt": "a" * 5000}).encode()

        async def chunks():
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        for content in (body, chunks()):
            answer = await http.post(COMPLETIONS, content=content)
            assert answer.status_code == 413
            assert "4096" in answer.json()["error"]["message"]
        await served(http)


async def test_unknown_fields_are_ignored_logged_or_refused_as_set(start_frontend, caplog) -> None:
    body = {"prompt": "Hello", "max_tokens": 1, "temprature": 1}
    for choice, status in (("ignore", 200), ("log", 200), ("refuse", 400)):
        async with start_frontend(unknown_fields=choice) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
            answer = await http.post(COMPLETIONS, json=body)
        assert answer.status_code == status
        assert ("temprature" in caplog.text) == (choice == "log")
        caplog.clear()
    assert answer.json()["error"]["param"] == "temprature"


async def test_a_shared_prompt_logprobs_rule_holds_for_streams(http) -> None:
    await refused(http, COMPLETIONS, {"prompt": "Hello", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs")


async def test_five_megabytes_of_tool_schemas_do_not_change_the_prompt(http) -> None:
    parameters = {"type": "object", "properties": {f"field_{i}": {"type": "string", "description": "d" * 200} for i in range(200)}}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(100)]
    body = json.dumps({"messages": HELLO, "tools": tools, "tool_choice": "none", "max_tokens": 1}).encode()
    assert len(body) > 4_500_000
    answer = await http.post(CHAT, content=body)
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["usage"]["prompt_tokens"] == 31


async def test_a_five_megabyte_prompt_is_refused_for_its_length(http) -> None:
    message = await refused(http, COMPLETIONS, {"prompt": "word " * (1024 * 1024)}, "prompt")
    assert "8192" in message
