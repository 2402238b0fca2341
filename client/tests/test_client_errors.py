"""What goes wrong arrives as the class for what can be done about it, with the field's name; what cannot be sent is refused before."""

import asyncio
import pickle

import httpx
import pytest
from trivet_client import (
    AccessError,
    CancelledCallError,
    Client,
    DeadlineExceededError,
    ErrorKind,
    InvalidRequestError,
    Message,
    NotFoundError,
    OverloadedError,
    RetryPolicy,
    SamplingParams,
    ServerError,
    Started,
    TextDelta,
    Tls,
    TrivetError,
    UnavailableError,
    collect,
)
from trivet_client.errors import CLASSES, typed

NAN = float("nan")
ONCE = RetryPolicy(attempts=1)


def test_every_kind_of_error_has_a_class() -> None:
    assert set(CLASSES) == set(ErrorKind)


@pytest.mark.parametrize("kind", ErrorKind)
def test_errors_survive_pickling_as_what_they_are(kind: ErrorKind) -> None:
    error = typed(TrivetError(kind, "why", param="n", retryable=True, retry_after_ms=5))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) is CLASSES[kind]
    assert (again.kind, again.message, again.param, again.retryable, again.retry_after_ms) == (kind, "why", "n", True, 5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: NAN}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
async def test_the_server_names_the_field_that_it_refuses(side, backend, fields: dict, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await side.call("chat", "Hello", SamplingParams(**fields))
    assert (caught.value.kind, caught.value.param, caught.value.retryable) == (ErrorKind.INVALID_ARGUMENT, param, False)
    assert backend.scheduler.adds == []


NAMELESS = {"id": "a", "type": "function", "function": {"arguments": "{}"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        *(({"role": role}, "messages[0].content") for role in ("user", "system", "developer")),
        *(({"role": role}, None) for role in ("assistant", "tool", "function")),
        ({"role": "user", "content": ""}, None),
        ({"role": "user", "content": []}, None),
        ({"role": "assistant", "tool_calls": [CALL]}, None),
        ({"role": "user", "tool_calls": [CALL]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [NAMELESS]}, "messages[0].tool_calls[0]"),
    ],
)
async def test_what_a_message_must_have_is_the_same_as_over_http(client: Client, backend, message: dict, param: str | None) -> None:
    async with httpx.AsyncClient(base_url=backend.frontend.http_url, timeout=20) as http:
        over_http = (await http.post("/tokenize", json={"messages": [message]})).json()
    try:
        here = {"tokens": list((await asyncio.to_thread(client.tokenize_chat, [message])).ids)}
    except InvalidRequestError as error:
        here = {"error": (error.param, error.message)}
    assert here.get("tokens") == over_http.get("tokens")
    if param is not None:
        assert here["error"] == (param, over_http["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1.0}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
        ({"bad_words": "word"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"cache_salt": b"\xff"}, "cache_salt"),
    ],
)
def test_sampling_that_cannot_be_sent_is_refused_by_name(client: Client, fields: dict, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.stream_chat("Hello", SamplingParams(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (5, "messages"),
        ({"role": "user", "content": "Hello"}, "messages"),
        ([5], "messages[0]"),
        (["Hello"], "messages[0]"),
        ([{"role": 5}], "messages[0].role"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "contents": "Hello"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([Message("user", "Hi"), {"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[1].tool_calls.function"),
    ],
)
def test_messages_that_cannot_be_sent_are_refused_by_name(client: Client, messages: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.stream_chat(messages)
    assert caught.value.param == param


def test_other_arguments_that_cannot_be_sent_are_refused_by_name(client: Client) -> None:
    for call, param in (
        (lambda: client.stream_complete([2**31]), "prompt"),
        (lambda: client.stream_complete([1.5]), "prompt"),
        (lambda: client.stream_complete("\ud800"), "prompt"),
        (lambda: client.tokenize("\ud800"), "text"),
        (lambda: client.detokenize(["a"]), "token_ids"),
        (lambda: client.embed("text"), "inputs"),
        (lambda: client.embed(["text", [1]]), "inputs"),
        (lambda: client.stream_chat("Hello", chat_template_kwargs={"a": NAN}), "chat_template_kwargs"),
        (lambda: client.stream_chat("Hello", documents=[{"a": object()}]), "documents"),
        (lambda: client.stream_chat("Hello", tools=[{"type": "function"}]), "tools[0].function"),
        (lambda: client.stream_chat("Hello", tool_choice={"type": "function"}), "tool_choice.function"),
        (lambda: client.stream_chat("Hello", timeout=0), "timeout"),
        (lambda: client.stream_chat("Hello", timeout=NAN), "timeout"),
        (lambda: client.model(name=5), "name"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.param == param


@pytest.mark.parametrize("address", ["", "host", "host:", ":8001", "http://host:8001", "host:99999", "unix:socket", "::1:8001"])
def test_an_address_that_cannot_be_right_is_refused_at_once(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="host:port") as caught:
        Client(address)
    assert caught.value.param == "address"


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "a\nb"])
def test_a_key_that_cannot_be_sent_is_refused_at_once(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="api_key"):
        Client(api_key=key)


def test_tls_files_that_are_not_there_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"root_certificates: '/nowhere/ca\.pem' cannot be read"):
        Client(tls=Tls(root_certificates="/nowhere/ca.pem"))
    with pytest.raises(InvalidRequestError, match="belong together"):
        Tls(private_key="/nowhere/key.pem")


async def test_an_unknown_model_is_not_found(side) -> None:
    for call in (("chat", "Hello"), ("complete", "Hello"), ("tokenize", "Hello"), ("detokenize", [1])):
        with pytest.raises(NotFoundError, match="other") as caught:
            await side.call(*call, model="other")
        assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    with pytest.raises(NotFoundError):
        await side.call("model", "other")


async def test_a_prompt_over_the_limit_of_a_message_leaves_the_client_usable(side) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await side.call("complete", "a" * (33 * 1024 * 1024))
    assert caught.value.kind is ErrorKind.TOO_LARGE
    assert await side.call("models")


async def test_a_key_is_sent_where_one_is_needed(start_backend, connect) -> None:
    with start_backend(api_key=("secret",)) as backend:
        for key in (None, "wrong"):
            stranger = connect(backend.address, api_key=key)
            for call in (("models",), ("chat", "Hello")):
                with pytest.raises(AccessError, match="API key") as caught:
                    await stranger.call(*call)
                assert caught.value.kind is ErrorKind.UNAUTHENTICATED
        known = connect(backend.address, api_key="secret")
        assert await known.call("models")
        assert (await known.call("chat", "Hello", SamplingParams(max_tokens=1))).text


async def test_an_error_within_a_stream_comes_after_its_events(side, backend) -> None:
    backend.do(lambda: setattr(backend.scheduler, "fail_after", 2))
    stream = side.client.stream_chat("Hello", SamplingParams(max_tokens=9))
    [started] = await side.read(stream, 1)
    assert isinstance(started, Started)
    with pytest.raises(ServerError, match="the worker failed") as caught:
        await side.read(stream)
    assert caught.value.kind is ErrorKind.INTERNAL
    with pytest.raises(ServerError, match="the worker failed"):
        await side.call("chat", "Hello", SamplingParams(max_tokens=9))
    assert len(backend.scheduler.adds) == 2


async def test_a_full_server_says_when_to_come_back(side, backend) -> None:
    full = TrivetError(ErrorKind.OVERLOADED, "the queue is full", retry_after_ms=1500)
    backend.do(lambda: setattr(backend.scheduler, "refusal", full))
    with pytest.raises(OverloadedError, match="the queue is full") as caught:
        await side.call("chat", "Hello")
    assert (caught.value.retryable, caught.value.retry_after_ms) == (True, 1500)
    assert len(backend.scheduler.adds) == 1, "only the caller knows whether to wait"


async def test_a_deadline_ends_the_call_and_the_request(side, backend) -> None:
    backend.do(lambda: setattr(backend.scheduler, "pause_after", 1))
    with pytest.raises(DeadlineExceededError):
        await side.call("chat", "Hello", timeout=0.3)
    stream = side.client.stream_chat("Hello", timeout=0.3)
    [started] = await side.read(stream, 1)
    with pytest.raises(DeadlineExceededError) as caught:
        await side.read(stream)
    assert isinstance(started, Started)
    assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
    backend.until_idle()
    assert len(backend.scheduler.aborted) == len(backend.scheduler.adds)


async def test_the_clients_own_deadline_holds_where_a_call_has_none(connect, backend) -> None:
    backend.do(lambda: setattr(backend.scheduler, "pause_after", 1))
    hurried = connect(backend.address, timeout=0.2)
    with pytest.raises(DeadlineExceededError):
        await hurried.call("chat", "Hello")


async def test_a_server_that_is_not_there_is_unavailable(connect) -> None:
    side = connect("unix:/nowhere/frontend.sock", retry=ONCE)
    for call in (("models",), ("chat", "Hello")):
        with pytest.raises(UnavailableError) as caught:
            await side.call(*call)
        assert (caught.value.kind, caught.value.retryable) == (ErrorKind.UNAVAILABLE, True)


async def test_a_closed_client_says_so(side) -> None:
    stream = side.client.stream_chat("Hello")
    await side.close()
    await side.close()
    with pytest.raises(CancelledCallError, match="the client is closed"):
        await side.call("models")
    with pytest.raises(CancelledCallError, match="the client is closed"):
        await side.read(stream)


async def test_an_asynchronous_client_belongs_to_one_loop(async_client) -> None:
    await async_client.models()

    def elsewhere() -> None:
        with pytest.raises(InvalidRequestError, match="another event loop") as caught:
            asyncio.run(async_client.models())
        assert caught.value.kind is ErrorKind.FAILED_PRECONDITION

    await asyncio.to_thread(elsewhere)


def test_a_client_of_another_process_is_refused(client: Client, monkeypatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(InvalidRequestError, match="another process"):
        client.models()


def test_an_answer_cut_short_is_no_answer() -> None:
    for events in ([], [Started("id", "model", 1, "")], [Started("id", "model", 1, ""), TextDelta(0, "half")]):
        with pytest.raises(ServerError, match="before the answer was finished"):
            collect(events)
