"""A scheduler is lost under running requests: what clients see when another takes over, when it comes back, and when nobody does."""

import asyncio
import contextlib
import json

import grpc.aio
import httpx
import pytest
from trivet_chassis.rpc import create_channel, error_of, is_serving
from trivet_proto.errors import ErrorKind
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
NAMES = ("", "ready", "trivet.v1.InferenceService")


async def until_status(http: httpx.AsyncClient, path: str, status: int, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while (await http.get(path)).status_code != status:
            await asyncio.sleep(0.02)


async def read_out(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_with_nobody_left_health_turns_and_every_kind_of_answer_ends_with_an_error(new_scheduler, serve, start_frontend) -> None:
    fake = new_scheduler("only", pause_after=2)
    async with contextlib.AsyncExitStack() as stack:
        running = contextlib.AsyncExitStack()
        await running.enter_async_context(serve(fake))
        frontend = await stack.enter_async_context(start_frontend(scheduler=(fake.address,), handover_timeout=0.5))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=frontend.http_url, timeout=20))
        stub = InferenceServiceStub(await stack.enter_async_context(create_channel(frontend.grpc_address)))
        body = {"messages": HELLO, "max_tokens": 50}
        whole = asyncio.create_task(http.post(CHAT, json=body))
        call = stub.Complete(inference_pb2.CompleteRequest(text="x", params=inference_pb2.GenerationParams(max_tokens=50)))
        assert (await call.read()).event.WhichOneof("event") == "started"
        streamed = await stack.enter_async_context(http.stream("POST", CHAT, json=body | {"stream": True}))
        lines = streamed.aiter_lines()
        await anext(lines)
        await fake.until(lambda: len(fake.live) == 3)
        await running.aclose()  # the scheduler's process is gone
        await until_status(http, "/health/ready", 503)
        for name in NAMES:
            assert not await is_serving(frontend.grpc_address, service=name)
        assert await is_serving(frontend.grpc_address, service="live")
        assert (await http.get("/health/live")).status_code == 200
        refused = await http.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert "data: [DONE]" not in rest
        assert (await whole).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_out(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        error = error_of(caught.value)
        assert (error.kind, error.retryable) == (ErrorKind.UNAVAILABLE, True)
        assert frontend.inference.requests_inside == 0
        fake.pause_after = None
        await running.enter_async_context(serve(fake))
        await until_status(http, "/health", 200)
        assert (await http.post(CHAT, json=body)).status_code == 200
        await running.aclose()


async def test_a_stream_goes_on_at_another_scheduler_as_if_nothing_had_been(new_scheduler, serve, start_frontend) -> None:
    first, second = new_scheduler("first"), new_scheduler("second")
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 20,
        "n": 2,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def read(lines) -> list[dict]:
        return [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]

    def summed(events: list[dict]) -> list[tuple[object, ...]]:
        found = []
        for index in range(2):
            choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
            logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            found.append(
                (
                    "".join(choice["text"] for choice in choices),
                    [token for block in logprobs for token in block["tokens"]],
                    [offset for block in logprobs for offset in block["text_offset"]],
                    choices[-1]["finish_reason"],
                )
            )
        return found

    addresses = (first.address, second.address)
    async with contextlib.AsyncExitStack() as stack:
        running = contextlib.AsyncExitStack()
        await running.enter_async_context(serve(first))
        frontend = await stack.enter_async_context(start_frontend(scheduler=addresses))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=frontend.http_url, timeout=20))
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            expected = await read(answer.aiter_lines())
        first.pause_after = 7
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.aiter_lines()
            begun = [json.loads((await anext(lines))[6:])]
            await first.until(lambda: len(first.live) == 2)
            await running.aclose()
            await running.enter_async_context(serve(second))
            events = begun + await read(lines)
        await running.aclose()
    assert summed(events) == summed(expected)
    usages = [event["usage"] for event in (events[-1], expected[-1])]
    # Nothing counts twice. The second time the prompt was cached.
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [(5, 40), (5, 40)]
    assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_progress_is_503_when_what_is_inside_stands_still(http, scheduler, frontend, monkeypatch) -> None:
    monkeypatch.setattr("trivet_frontend.openai.gateway.STUCK_SECONDS", 0.2)
    assert (await http.get("/health/progress")).json() == {"busy": False, "last_step_age_ms": None}
    scheduler.flowing.clear()
    scheduler.last_step_age_ms = 3
    waiting = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}))
    await scheduler.until(lambda: bool(scheduler.live))
    # A request that waits while the scheduler makes steps is no standstill.
    async with asyncio.timeout(5):
        while frontend.inference.progress()[1] is None or frontend._engine.progress()[1] > 0.2:
            await asyncio.sleep(0.01)
    assert (await http.get("/health/progress")).json()["busy"] is True
    scheduler.last_step_age_ms = 60_000
    await until_status(http, "/health/progress", 503)
    assert (await http.get("/health/ready")).status_code == 200
    scheduler.flowing.set()
    assert (await waiting).status_code == 200
    assert (await http.get("/health/progress")).status_code == 200


async def test_two_live_requests_of_one_id_are_two_requests(http, scheduler, frontend) -> None:
    scheduler.pause_after = 1
    headers = {"X-Request-Id": "mine"}
    first = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 5}, headers=headers))
    await scheduler.until(lambda: len(scheduler.live) == 1)
    second = await http.post(COMPLETIONS, json={"prompt": "y", "max_tokens": 1}, headers=headers)
    assert (second.status_code, second.headers["x-request-id"]) == (200, "mine")
    async with create_channel(frontend.grpc_address) as channel:
        stub = InferenceServiceStub(channel)
        request = inference_pb2.CompleteRequest(text="z", params=inference_pb2.GenerationParams(max_tokens=1))
        for given, shown in (("mine", "mine"), ("x" * 10_000, None), ("two words", None)):
            response = await stub.Complete(request, metadata=(("x-request-id", given),)).read()
            made = response.event.started.request_id
            assert made == shown or (shown is None and len(made) == 32)
        request.request_id = "of the\r\nmessage"
        response = await stub.Complete(request).read()
        assert len(response.event.started.request_id) == 32
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await scheduler.until(lambda: not scheduler.live)
    assert len(scheduler.aborted) == 1
    assert len({add.uid for add in scheduler.adds}) == len(scheduler.adds)
