"""The mock scheduler under the real frontend: text of chats and completions, errors, a session that ends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from trivet_chassis.clock import SystemClock
from trivet_doubles.mock_scheduler import Faults, MockScheduler, MockSchedulerSettings
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import expected_output
from trivet_frontend.config import FrontendSettings
from trivet_frontend.server import Frontend
from trivet_proto.sampling import child_seed


@pytest.fixture
async def scheduler(socket_folder: Path, model: DoubleModel) -> AsyncIterator[MockScheduler]:
    async with MockScheduler(MockSchedulerSettings(listen=f"unix:{socket_folder}/s.sock"), model=model) as scheduler:
        yield scheduler


@pytest.fixture
async def http(scheduler: MockScheduler) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a frontend of that scheduler."""
    settings = FrontendSettings(scheduler=(scheduler.address,), port=0, grpc_listen="", tokenizer_threads=1, handover_timeout=0)
    frontend = Frontend(settings, clock=SystemClock())
    await frontend.start()
    following = asyncio.create_task(frontend.follow_engine())
    try:
        async with asyncio.timeout(10):
            while not frontend.inference.ready:
                assert not following.done(), following.exception()
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=frontend.http_url, timeout=20) as client:
            yield client
    finally:
        await frontend.stop()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


@pytest.fixture(scope="module")
def tokenizer(model: DoubleModel) -> Tokenizer:
    return Tokenizer.from_str(model.bundle.files["tokenizer.json"].decode())


CHAT = "<|start|>user\nHello!<|end|>\n<|start|>assistant\n"


async def test_a_chat_and_a_completion_read_as_the_law_says(http: httpx.AsyncClient, model: DoubleModel, tokenizer: Tokenizer) -> None:
    body = {"model": "synthetic", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12, "seed": 5, "n": 2}
    chat = (await http.post("/v1/chat/completions", json=body)).json()
    prompt = tokenizer.encode(CHAT).ids
    assert [choice["message"]["content"] for choice in chat["choices"]] == [
        tokenizer.decode(expected_output(prompt, child_seed(5, index), 12, model.words)) for index in range(2)
    ]
    assert chat["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "total_tokens": len(prompt) + 24,
        "prompt_tokens_details": None,
    }
    answer = (await http.post("/v1/completions", json={"model": "synthetic", "prompt": [10, 11], "max_tokens": 4, "seed": 0})).json()
    assert answer["choices"][0]["text"] == tokenizer.decode(expected_output([10, 11], 0, 4, model.words))
    assert answer["choices"][0]["finish_reason"] == "length"


async def events(http: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    body = {"model": "synthetic", "prompt": [10, 11], "max_tokens": 12, "seed": 0, "stream": True, **fields}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(came: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in came if event["choices"])


async def test_a_stream_stops_at_a_stop_string(http: httpx.AsyncClient, model: DoubleModel, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(expected_output([10, 11], 0, 12, model.words))
    word = text.split(" ")[5]
    assert text_of(await events(http, stop=[word])) == text[: text.index(word)]


async def test_what_the_scheduler_refuses_is_429_and_what_fails_is_500(http: httpx.AsyncClient, scheduler: MockScheduler) -> None:
    body = {"model": "synthetic", "prompt": [10, 11], "max_tokens": 12}
    scheduler.life.faults = Faults(refuse_every=1)
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert "Retry-After" in refused.headers
    scheduler.life.faults = Faults(fail_after=3)
    failed = await http.post("/v1/completions", json=body)
    assert failed.status_code == 500
    scheduler.life.faults = Faults()
    assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("fault", [{"end_session_after": 4}, {"garbage_after": 4}])
async def test_the_end_of_a_session_ends_its_streams_with_a_retryable_error_and_the_next_is_served(
    http: httpx.AsyncClient, scheduler: MockScheduler, model: DoubleModel, tokenizer: Tokenizer, fault: dict[str, int]
) -> None:
    scheduler.life.faults = Faults(**fault)
    *_, last = await events(http)
    assert last["error"]["code"] == "unavailable"
    scheduler.life.faults = Faults()

    async def served() -> bool:
        return (await http.get("/health/ready")).status_code == 200

    async with asyncio.timeout(10):
        while not await served():
            await asyncio.sleep(0.02)
    assert text_of(await events(http)) == tokenizer.decode(expected_output([10, 11], 0, 12, model.words))


async def test_a_row_that_nobody_asked_for_ends_the_session_before_it_is_believed(
    http: httpx.AsyncClient, scheduler: MockScheduler
) -> None:
    scheduler.life.faults = Faults(unknown_rows=True)
    answer = await http.post("/v1/completions", json={"model": "synthetic", "prompt": [10, 11], "max_tokens": 5})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"
