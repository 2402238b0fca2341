"""A caller of the gateway's HTTP API, as thin as a test wants it: bodies in, parsed answers out.

It states nothing about what is right; it only refuses bodies that aren't strict JSON, which holds for every answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment import eventually

T = TypeVar("T")
Body = dict[str, Any]


def strict_json(text: str | bytes) -> Any:
    """Parses JSON and refuses what only Python calls JSON: NaN and the infinities."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in a JSON body")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in OpenAI's error shape."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None


class Gateway:
    """Calls one deployment; use it as made by `calling`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def answer(self, path: str, body: Any) -> Any:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text[:2000]
        return strict_json(response.content)

    async def complete(self, prompt: Any, **fields: Any) -> Any:
        """A text completion, greedy unless told otherwise."""
        return await self.answer("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)

    async def chat(self, messages: Any, **fields: Any) -> Any:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.answer("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields)

    async def refusal(self, path: str, body: Any) -> Refusal:
        """The error that `body` is answered with; checks its shape."""
        response = await self.post(path, body)
        assert response.status_code >= 400, f"not refused: {response.text[:2000]}"
        return refusal_of(response)

    @asynccontextmanager
    async def streaming(self, path: str, body: Body) -> AsyncIterator[AsyncIterator[Any]]:
        """The chunks of a stream as they come; leaving early closes the connection, as a client that goes away does."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
            assert response.status_code == 200, response.text[:2000]
            assert response.headers["content-type"].startswith("text/event-stream")
            yield self._chunks(response)

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[Any]:
        async for line in response.aiter_lines():
            if not line or line.startswith(":"):
                continue
            field, _, value = line.partition(": ")
            assert field == "data", f"clients ignore the field {field!r}"
            if value == "[DONE]":
                return
            chunk = strict_json(value)
            assert "error" not in chunk, chunk
            yield chunk
        raise AssertionError("the stream ended without [DONE]")

    async def stream(self, path: str, body: Body) -> list[Any]:
        async with self.streaming(path, body) as chunks:
            return [chunk async for chunk in chunks]

    async def stream_completion(self, prompt: Any, **fields: Any) -> list[Any]:
        return await self.stream("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)

    async def stream_chat(self, messages: Any, **fields: Any) -> list[Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields)

    async def tokenize(self, text: str) -> list[int]:
        answer = await self.answer("/tokenize", {"prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    async def detokenize(self, token_ids: list[int]) -> str:
        return str((await self.answer("/detokenize", {"tokens": token_ids}))["prompt"])

    async def metrics(self) -> dict[str, float]:
        """Every sample of the gateway's `/metrics`, summed over its labels."""
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    async def idle(self, *, within: float = 5.0) -> None:
        """Waits until nothing runs or waits and no block is held; cached blocks count as free."""

        async def nothing_held() -> bool:
            now = await self.metrics()
            return not any(now[name] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"))

        await eventually(nothing_held, within=within, what="no request and no block is held")

    async def still_answers(self) -> None:
        """A plain request is served as ever."""
        answer = await self.complete("The capital of France is", max_tokens=4)
        assert answer["choices"][0]["text"].startswith(" Paris")


@asynccontextmanager
async def calling(base_url: str) -> AsyncIterator[Gateway]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=base_url, timeout=240, limits=limits) as client:
        yield Gateway(client)


def refusal_of(response: httpx.Response) -> Refusal:
    """Reads an error body and holds it to OpenAI's shape; nothing of the inside may show."""
    body = strict_json(response.content)
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert '.py"' not in error["message"]
    return Refusal(response.status_code, error["message"], error["type"], error["param"], error["code"])


def text_of(chunks: list[Any]) -> str:
    """The text of choice 0 that a stream, of chat or of completions, delivered."""
    return "".join(deltas_of(chunks))


def deltas_of(chunks: list[Any]) -> list[str]:
    deltas = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == 0:
                deltas.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return deltas


def finish_of(chunks: list[Any]) -> str:
    """The one finish reason of choice 0."""
    reasons = [
        choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0 and choice["finish_reason"]
    ]
    assert len(reasons) == 1, reasons
    return str(reasons[0])


def ids_of(answer: Any, index: int = 0) -> list[int]:
    """The generated ids of a completion that was asked with `return_token_ids`."""
    return list(answer["choices"][index]["token_ids"])


async def together(*calls: Awaitable[T]) -> list[T]:
    """All of `calls` at once, in order."""
    return list(await asyncio.gather(*calls))
