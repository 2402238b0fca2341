"""The official client, unmodified: sync and async, whole and streamed."""

import asyncio

import openai
import pytest
from trivet_frontend.server import Frontend

HELLO = [{"role": "user", "content": "Hello"}]
MODEL = "SmolLM2-135M-Instruct"


async def test_the_async_client_chats_and_completes(frontend: Frontend) -> None:
    async with openai.AsyncOpenAI(base_url=f"{frontend.http_url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=6, logprobs=True, top_logprobs=2, seed=1, user="u", metadata={"a": "b"}
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 37
        completion = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, logprobs=1, echo=True)
        assert completion.choices[0].text.startswith("Hello")
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
        assert caught.value.param == "temperature"


async def test_the_stream_helper_puts_chunks_together(frontend: Frontend, scheduler) -> None:
    scheduler.script = lambda add, index: [1000, 1001, 2]
    async with (
        openai.AsyncOpenAI(base_url=f"{frontend.http_url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model=MODEL, messages=HELLO, max_completion_tokens=50) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content


async def test_the_sync_client_works_too(frontend: Frontend) -> None:
    def talk() -> tuple[str, str, str]:
        with openai.OpenAI(base_url=f"{frontend.http_url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
            with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, stream=True) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, stream=True) as pieces:
                finishes = [piece.choices[0].finish_reason for piece in pieces]
            return answer.choices[0].message.content or "", streamed, ",".join(finish for finish in finishes if finish)

    whole, streamed, finishes = await asyncio.to_thread(talk)
    assert whole == streamed
    assert finishes == "length,length"
