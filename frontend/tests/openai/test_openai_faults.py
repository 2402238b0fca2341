"""What goes wrong on the way: engine failures before and after the first delta, clients that leave, draining, a lost scheduler."""

import asyncio
import contextlib
import json
from random import Random

import httpx
import openai
import pytest
from trivet_proto.errors import ErrorKind, TrivetError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def until_ready(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(10):
        while (await http.get("/health/ready")).status_code != status:
            await asyncio.sleep(0.02)


async def test_a_failure_before_the_first_delta_is_an_ordinary_error(http, scheduler) -> None:
    for kind, status in ((ErrorKind.INTERNAL, 500), (ErrorKind.INVALID_ARGUMENT, 400), (ErrorKind.OVERLOADED, 429)):
        scheduler.refusal = TrivetError(kind, "the engine says no", param="prompt", retry_after_ms=2500)
        for stream in (False, True):
            answer = await http.post(CHAT, json={"messages": HELLO, "stream": stream})
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "the engine says no"
        assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


async def test_a_failure_after_the_first_delta_is_a_data_event_and_the_end(http, scheduler, frontend) -> None:
    scheduler.fail_after = 2
    async with http.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 9, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    error = json.loads(lines[-1][6:])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 'finish_reason":"stop' not in "".join(lines)
    client = openai.AsyncOpenAI(base_url=f"{frontend.http_url}/v1", api_key="x", max_retries=0)
    async with client:
        stream = await client.chat.completions.create(model="", messages=HELLO, max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="the worker failed"):
            [chunk async for chunk in stream]


async def test_other_streams_go_on_when_one_fails(http, scheduler) -> None:
    scheduler.script = lambda add, index: [1000 + step for step in range(add.sampling.max_tokens)]
    scheduler.fail_after = 5
    answers = await asyncio.gather(*(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": count}) for count in (3, 9, 4)))
    assert [answer.status_code for answer in answers] == [200, 500, 200]


async def test_a_failed_child_gives_up_its_siblings(http, scheduler) -> None:
    scheduler.script = lambda add, index: [1000] * (9 if index else 2)
    scheduler.fail_after, scheduler.pause_after = 4, 3
    scheduler.tokens_per_step = 1
    running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 9, "n": 2}))
    await scheduler.until(lambda: len(scheduler.live) == 1)
    [handle] = scheduler.live
    scheduler.fail(handle)
    answer = await running
    assert answer.status_code == 500


async def test_a_client_that_leaves_is_aborted_at_the_engine(http, scheduler) -> None:
    scheduler.pause_after = 2
    for stream in (True, False):
        scheduler.aborted.clear()
        task = asyncio.create_task(read_some(http, {"messages": HELLO, "max_tokens": 50, "stream": stream}))
        await scheduler.until(lambda: bool(scheduler.live))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scheduler.until(lambda: len(scheduler.aborted) == 1)
        assert not scheduler.live


async def test_a_client_that_leaves_while_queued_is_aborted(http, scheduler) -> None:
    scheduler.flowing.clear()
    for stream in (True, False):
        scheduler.aborted.clear()
        task = asyncio.create_task(read_some(http, {"messages": HELLO, "n": 2, "stream": stream}))
        await scheduler.until(lambda: len(scheduler.live) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scheduler.until(lambda: len(scheduler.aborted) == 2)


async def read_some(http: httpx.AsyncClient, body: dict) -> None:
    async with http.stream("POST", CHAT, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def test_a_lost_scheduler_ends_streams_with_an_error_and_readiness_returns_with_it(http, scheduler) -> None:
    scheduler.pause_after = 2
    async with http.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 50, "stream": True}) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        scheduler.kill.set()
        rest = [line async for line in lines if line]
    assert "went away" in rest[-1]
    assert json.loads(rest[-1][6:])["error"]["code"] == "unavailable"
    await until_ready(http, 503)
    answer = await http.post(COMPLETIONS, json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert (await http.get("/health/live")).status_code == 200
    scheduler.kill.clear()
    scheduler.pause_after = None
    await until_ready(http, 200)
    assert (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_readiness_needs_a_worker(http, scheduler) -> None:
    scheduler.replicas_ready = 0
    await until_ready(http, 503)
    for path in ("/health", "/ping"):
        assert (await http.get(path)).status_code == 503


async def test_draining_lets_running_streams_finish_and_takes_no_new_ones(start_frontend, scheduler) -> None:
    async with start_frontend() as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        scheduler.flowing.clear()
        running = asyncio.create_task(http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}))
        await scheduler.until(lambda: bool(scheduler.live))
        draining = asyncio.create_task(frontend.drain())
        async with asyncio.timeout(5):
            while not frontend.inference.draining:
                await asyncio.sleep(0.01)
        assert (await http.get("/health")).status_code == 503
        assert (await http.post(CHAT, json={"messages": HELLO})).status_code == 503
        assert not draining.done()
        scheduler.flowing.set()
        answer = await running
        assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "length")
        await asyncio.wait_for(draining, 5)


async def test_streams_that_outlast_the_drain_end_with_an_error(start_frontend, scheduler) -> None:
    scheduler.pause_after = 2
    async with contextlib.AsyncExitStack() as stack:
        async with start_frontend(drain_timeout=0.1) as frontend:
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=frontend.http_url))
            body = {"messages": HELLO, "max_tokens": 50, "stream": True}
            answer = await stack.enter_async_context(http.stream("POST", CHAT, json=body))
            lines = answer.aiter_lines()
            await anext(lines)
            await frontend.drain()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "unavailable"


async def test_too_many_requests_are_told_to_come_back(start_frontend, scheduler) -> None:
    scheduler.flowing.clear()
    async with start_frontend(max_requests=1) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        first = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}))
        await scheduler.until(lambda: bool(scheduler.live))
        answer = await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"
        scheduler.flowing.set()
        assert (await first).status_code == 200
        # The door is open again, also after refusals.
        assert (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status_code == 200
        assert frontend.inference.requests_inside == 0


async def test_after_random_cancels_nothing_is_left(frontend, scheduler) -> None:
    random = Random(7)
    before = len(asyncio.all_tasks())

    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "x" * (number + 1), "max_tokens": random.randint(1, 64), "n": random.choice((1, 1, 3)), "stream": number % 2 == 0}
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(random.uniform(0.001, 0.2) if number % 3 == 0 else 20),
                http.stream("POST", COMPLETIONS, json=body) as a,
            ):
                async for _ in a.aiter_bytes():
                    pass

    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=frontend.http_url, limits=limits, timeout=20) as http:
        await asyncio.gather(*(one(http, number) for number in range(64)))
        async with asyncio.timeout(5):
            await frontend.inference.until_empty()
        await scheduler.until(lambda: not scheduler.live)
        metrics = (await http.get("/metrics")).text
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.02)
    assert 'trivet_frontend_requests_in_flight{model_name="SmolLM2-135M-Instruct"} 0.0' in metrics
