"""Connections at their limits: silent streams, heads and bodies that do not come, too many clients, clients that do not read."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from trivet_frontend.openai.connection import MAX_HEAD_BYTES

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def place_of(frontend) -> tuple[str, int]:
    host, port = frontend.http_url.removeprefix("http://").split(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def connection(frontend) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*place_of(frontend))
    try:
        yield reader, writer
    finally:
        writer.close()


def post(body: dict, *, headers: str = "") -> bytes:
    payload = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n{headers}\r\n".encode() + payload


async def test_a_stream_that_is_queued_sends_comments_and_then_its_answer(start_frontend, scheduler) -> None:
    scheduler.flowing.clear()
    async with start_frontend(sse_keepalive=0.1) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        async with http.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 3, "stream": True}) as answer:
            lines = answer.aiter_lines()
            seen = [await anext(lines)]
            while seen.count(": keep-alive") < 3:
                seen.append(await anext(lines))
            assert "assistant" in "".join(seen)
            scheduler.flowing.set()
            rest = [line async for line in lines if line and not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        deltas = [json.loads(line[6:])["choices"][0] for line in rest[:-1]]
        assert deltas[-1]["finish_reason"] == "length"
        whole = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
        text = "".join(delta["delta"].get("content", "") for delta in deltas)
        assert text == whole.json()["choices"][0]["message"]["content"]


async def test_a_failure_of_a_stream_that_began_with_a_comment_is_an_event(start_frontend, scheduler) -> None:
    scheduler.flowing.clear()
    async with start_frontend(sse_keepalive=0.1) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        async with http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            await anext(lines)
            [handle] = scheduler.live
            scheduler.fail(handle)
            rest = [line async for line in lines if line.startswith("data: ")]
        assert json.loads(rest[-1][6:])["error"]["message"] == "the worker failed"
        assert frontend.inference.requests_inside == 0


async def test_a_head_or_body_that_does_not_come_is_given_up(start_frontend) -> None:
    async with start_frontend(header_timeout=0.2, body_timeout=0.2) as frontend, asyncio.timeout(10):
        async with connection(frontend) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost")
            assert b"408 Request Timeout" in await reader.read()
        async with connection(frontend) as (reader, _):
            assert await reader.read() == b""
        async with connection(frontend) as (reader, writer):
            writer.write(post({"messages": HELLO})[:-5])
            answer = await reader.readuntil(b"}")
            assert answer.startswith(b"HTTP/1.1 504")
            assert b"body did not come" in answer


async def test_a_connection_may_rest_between_requests_and_trickle_no_head(start_frontend) -> None:
    async with start_frontend(header_timeout=0.3) as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        for _ in range(2):
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)  # longer than a head may take
        writer.write(b"GET /health/live HTTP/1.1\r\n")
        assert b"408" in await reader.read()


async def test_a_head_that_is_too_large_is_refused(start_frontend) -> None:
    async with start_frontend() as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(20):
            writer.write(b"x" * 10_000)
            await writer.drain()
        assert b"431" in await reader.read(), "the answer is not lost for what is still being sent"


async def answer_to(frontend, sent: bytes) -> tuple[int, dict]:
    """Status and body of the answer to what is sent whole on a connection of its own, which the frontend then closes."""
    async with connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


def head_of(size: int, *, in_target: bool = False) -> bytes:
    """The head of a request, of so many bytes."""
    before, after = (b"GET /health/live?", b" HTTP/1.1\r\nConnection: close\r\n\r\n")
    if not in_target:
        before, after = b"GET /health/live HTTP/1.1\r\nConnection: close\r\nX: ", b"\r\n\r\n"
    return before + b"x" * (size - len(before) - len(after)) + after


async def test_the_limit_on_a_head_holds_to_the_byte_however_it_comes(start_frontend) -> None:
    async with start_frontend() as frontend:
        assert (await answer_to(frontend, head_of(MAX_HEAD_BYTES)))[0] == 200
        for size in (MAX_HEAD_BYTES + 1, 66_000, 100_000, 131_000, 250_000):
            for in_target in (False, True):
                status, body = await answer_to(frontend, head_of(size, in_target=in_target))
                assert (status, body["error"]["type"]) == (431, "invalid_request_error")
                assert str(MAX_HEAD_BYTES) in body["error"]["message"]


async def test_a_head_that_is_too_large_is_refused_behind_the_answers_before_it(start_frontend, scheduler) -> None:
    scheduler.flowing.clear()
    async with start_frontend() as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(post({"messages": HELLO, "max_tokens": 2}) + head_of(66_000))
        await scheduler.until(lambda: bool(scheduler.live))
        scheduler.flowing.set()
        answers = await reader.read()
        assert answers.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"length"' in answers.partition(b"HTTP/1.1 431")[0]
        assert answers.count(b"HTTP/1.1 ") == 2


async def test_a_body_that_comes_behind_its_answer_is_no_head(start_frontend) -> None:
    async with start_frontend() as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n")
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
        for _ in range(30):
            writer.write(b"x" * 10_000)
            await writer.drain()
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")


async def test_a_head_that_began_behind_a_request_has_the_time_of_all_heads(start_frontend, scheduler) -> None:
    scheduler.flowing.clear()
    async with start_frontend(header_timeout=0.2) as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(post({"messages": HELLO, "max_tokens": 2}) + b"GET /health/live HTTP/1.1\r\n")
        await scheduler.until(lambda: bool(scheduler.live))
        scheduler.flowing.set()
        await reader.readuntil(b"}}")
        writer.write(b"X: ")
        assert b"408" in await reader.read()


MALFORMED = {
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "no version": b"GET / HTTZ/9\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    "a length that is none": b"POST /v1/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    "a target that is none": b"GET http://[ HTTP/1.1\r\n\r\n",
    "a chunk that is none": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_not_http_gets_the_shape_of_all_errors_and_a_line_that_says_what(start_frontend, caplog, name: str) -> None:
    async with start_frontend() as frontend:
        status, body = await answer_to(frontend, MALFORMED[name])
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["message"].startswith("the request cannot be read as HTTP: ")
        words = body["error"]["message"].partition("HTTP: ")[2]
        assert words
        assert f"what 127.0.0.1 sent is not HTTP: {words}" in caplog.text


@pytest.mark.parametrize("behind", [b"\x00\x00\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + 600_000 * b"x"])
async def test_what_is_refused_behind_a_stream_that_runs_does_not_get_into_it(start_frontend, scheduler, behind: bytes) -> None:
    scheduler.pause_after = 2
    async with start_frontend() as frontend, connection(frontend) as (reader, writer), asyncio.timeout(10):
        writer.write(post({"messages": HELLO, "max_tokens": 9, "stream": True}))
        seen = await reader.readuntil(b"data: ")
        writer.write(behind)
        with contextlib.suppress(ConnectionError):
            seen += await reader.read()
        assert seen.count(b"HTTP/1.1 ") == 1
        await scheduler.until(lambda: not scheduler.live)


async def test_connections_over_the_limit_are_told_to_come_back(start_frontend) -> None:
    async with start_frontend(max_connections=2) as frontend, contextlib.AsyncExitStack() as stack, asyncio.timeout(10):
        pairs = [await stack.enter_async_context(connection(frontend)) for _ in range(2)]
        for reader, writer in pairs:
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"}")
        async with connection(frontend) as (reader, _):
            refused = await reader.read()
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in refused
        for reader, writer in pairs:
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_does_not_read_loses_its_connection_and_leaves_nothing(start_frontend, scheduler, caplog) -> None:
    scheduler.script = lambda add, index: [1000] * 100_000
    scheduler.tokens_per_step = 1000
    async with start_frontend(slow_client_timeout=1) as frontend, asyncio.timeout(20):
        with socket.create_connection(place_of(frontend)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"messages": HELLO, "max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
            deaf.sendall(post(body))
            while not frontend.inference.streams.count:
                await asyncio.sleep(0.02)
            while frontend.inference.streams.count:
                await asyncio.sleep(0.05)
        assert frontend.inference.requests_inside == 0
    assert "has not read its stream for 1 s" in caplog.text


async def test_a_request_that_takes_too_long_is_ended_everywhere(start_frontend, scheduler) -> None:
    scheduler.pause_after = 2
    async with start_frontend(request_timeout=0.3) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        body = {"messages": HELLO, "max_tokens": 50}
        whole = await http.post(CHAT, json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
        async with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        await scheduler.until(lambda: not scheduler.live)
        assert all(0 < add.timeout_ms <= 300 for add in scheduler.adds)
        assert frontend.inference.requests_inside == 0
