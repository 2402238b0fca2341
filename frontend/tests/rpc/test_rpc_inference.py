"""The public gRPC API: the same answers and refusals as HTTP, as typed events and statuses."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from trivet_chassis.rpc import create_channel, error_of, is_serving
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

CAPITAL_IDS = [504, 3575, 282, 4649, 314]


@pytest.fixture
async def stub(frontend) -> AsyncIterator[InferenceServiceStub]:
    async with create_channel(frontend.grpc_address) as channel:
        yield InferenceServiceStub(channel)


def chat_request(**params: object) -> inference_pb2.ChatRequest:
    message = inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text="Hello")])
    return inference_pb2.ChatRequest(messages=[message], params=inference_pb2.GenerationParams(**params))


async def events_of(call) -> list[inference_pb2.GenerationEvent]:
    return [response.event async for response in call]


def text_of(events: list[inference_pb2.GenerationEvent]) -> str:
    return "".join(event.text.text for event in events if event.WhichOneof("event") == "text")


async def refused(call) -> tuple[grpc.StatusCode, TrivetError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (events_of(call) if hasattr(call, "__aiter__") else call)
    return caught.value.code(), error_of(caught.value)


async def test_chat_streams_started_text_and_finished(stub, http) -> None:
    events = await events_of(stub.Chat(chat_request(max_tokens=5, logprobs=1, return_token_ids=True)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert set(kinds[1:-1]) == {"text"}
    assert kinds[-1] == "finished"
    assert events[0].started.prompt_tokens == 31
    usage = events[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, events[-1].finished.finish_reason) == (31, 5, "length")
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5})
    assert text_of(events) == answer.json()["choices"][0]["message"]["content"]
    texts = [event.text for event in events if event.WhichOneof("event") == "text"]
    assert sum(len(unpack_i32(text.token_ids)) for text in texts) == sum(len(text.logprobs) for text in texts) == 5
    assert len(texts[0].logprobs[0].top) == 1


async def test_complete_takes_text_and_ids_alike(stub) -> None:
    params = inference_pb2.GenerationParams(max_tokens=3, prompt_logprobs=1)
    texts = []
    for prompt in ({"text": "The capital of France is"}, {"token_ids": inference_pb2.TokenIds(ids=pack_i32(CAPITAL_IDS))}):
        events = await events_of(stub.Complete(inference_pb2.CompleteRequest(params=params, echo=True, **prompt)))
        texts.append(text_of(events))
        [report] = [event.prompt for event in events if event.WhichOneof("event") == "prompt"]
        assert (report.first_position, [row.token_id for row in report.logprobs]) == (1, CAPITAL_IDS[1:])
    assert texts[0] == texts[1]
    assert texts[0].startswith("The capital of France is")


async def test_bad_requests_are_invalid_argument_with_the_field(stub, scheduler) -> None:
    nan = float("nan")
    for params, field in (
        ({"temperature": nan}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": [inference_pb2.LogitBias(token_id=49152, bias=1)]}, "logit_bias"),
        ({"logit_bias": [inference_pb2.LogitBias(token_id=5, bias=nan)]}, "logit_bias"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 2**62}, "max_tokens"),
    ):
        code, error = await refused(stub.Chat(chat_request(**params)))
        assert (code, error.kind, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, ErrorKind.INVALID_ARGUMENT, field)
    for request in (
        inference_pb2.CompleteRequest(),
        inference_pb2.CompleteRequest(text=""),
        inference_pb2.CompleteRequest(token_ids=inference_pb2.TokenIds()),
        inference_pb2.CompleteRequest(token_ids=inference_pb2.TokenIds(ids=pack_i32([49152]))),
    ):
        code, error = await refused(stub.Complete(request))
        assert (code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    code, _ = await refused(stub.Complete(inference_pb2.CompleteRequest(token_ids=inference_pb2.TokenIds(ids=b"abc"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, error = await refused(stub.Chat(inference_pb2.ChatRequest(model="other")))
    assert (code, error.kind) == (grpc.StatusCode.NOT_FOUND, ErrorKind.MODEL_NOT_FOUND)
    assert scheduler.adds == []


async def test_what_the_model_does_not_serve_is_a_typed_error(stub) -> None:
    code, error = await refused(stub.Embed(inference_pb2.EmbedRequest(texts=["x"])))
    assert (code, error.kind) == (grpc.StatusCode.UNIMPLEMENTED, ErrorKind.UNIMPLEMENTED)
    assert "generate" in error.message


async def test_tokens_and_models(stub) -> None:
    answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="The capital of France is", return_token_strings=True))
    assert unpack_i32(answer.token_ids).tolist() == CAPITAL_IDS
    assert list(answer.tokens) == ["The", " capital", " of", " France", " is"]
    chat = inference_pb2.ChatMessages(messages=chat_request().messages)
    assert len(unpack_i32((await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids)) == 31
    text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=pack_i32(CAPITAL_IDS)))
    assert text.text == "The capital of France is"
    [model] = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.vocab_size) == ("SmolLM2-135M-Instruct", 8192, 49152)
    assert (await stub.GetModel(inference_pb2.GetModelRequest(model=model.name))).model == model
    code, _ = await refused(stub.GetModel(inference_pb2.GetModelRequest(model="other")))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_an_error_after_the_first_event_is_an_event_and_the_status(stub, scheduler) -> None:
    scheduler.fail_after = 2
    events: list[inference_pb2.GenerationEvent] = []

    async def read() -> None:
        async for response in stub.Chat(chat_request(max_tokens=9)):
            events.append(response.event)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert events[-1].error.message == "the worker failed"
    assert error_of(caught.value).kind is ErrorKind.INTERNAL
    assert "finished" not in [event.WhichOneof("event") for event in events]
    scheduler.refusal = TrivetError(ErrorKind.OVERLOADED, "full", retry_after_ms=10)
    code, error = await refused(stub.Chat(chat_request()))
    assert (code, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 10)


async def test_cancelling_and_deadlines_abort_at_the_engine(stub, scheduler, frontend) -> None:
    scheduler.pause_after = 1
    call = stub.Chat(chat_request(max_tokens=50))
    await call.read()
    call.cancel()
    await scheduler.until(lambda: len(scheduler.aborted) == 1)
    code, _ = await refused(stub.Chat(chat_request(max_tokens=50), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.until(lambda: len(scheduler.aborted) == 2)
    async with asyncio.timeout(5):
        await frontend.inference.until_empty()


async def test_health_follows_the_engine(frontend, scheduler) -> None:
    async def until(serving: bool) -> None:
        async with asyncio.timeout(10):
            while await is_serving(frontend.grpc_address, service="trivet.v1.InferenceService") is not serving:
                await asyncio.sleep(0.02)

    await until(True)
    scheduler.replicas_ready = 0
    await until(False)
    scheduler.replicas_ready = 1
    await until(True)


async def test_a_key_is_needed_where_one_is_set(start_frontend) -> None:
    async with start_frontend(api_key=("secret",)) as frontend, create_channel(frontend.grpc_address) as channel:
        stub = InferenceServiceStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            code, _ = await refused(stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            code, _ = await refused(stub.Chat(chat_request(), metadata=metadata))
            assert code is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", "Bearer secret"),)
        assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=key)).models
        assert await events_of(stub.Chat(chat_request(max_tokens=1), metadata=key))


async def test_a_message_over_the_limit_leaves_the_channel_usable(stub) -> None:
    code, _ = await refused(stub.Complete(inference_pb2.CompleteRequest(text="a" * (33 * 1024 * 1024))))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models
