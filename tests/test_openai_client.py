"""The official `openai` client works unmodified: chat and completions, whole and streamed, sync and async, and its errors are raised."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from tests.deployment import Deployment

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


@pytest.fixture
def client(server: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture
async def async_client(server: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_retrieved(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


def test_a_chat_completion_answers(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model == model


def test_a_streamed_chat_completion_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_of_the_client_assembles_the_message(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    ) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 8


def test_a_completion_answers_text_and_ids_alike(client: openai.OpenAI, model: str) -> None:
    from_text = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    from_ids = client.completions.create(model=model, prompt=[504, 3575, 282, 4649, 314], max_tokens=8, temperature=0)
    assert from_text.choices[0].text.startswith(" Paris")
    assert from_text.choices[0].text == from_ids.choices[0].text


def test_a_list_of_prompts_gives_a_choice_for_each(client: openai.OpenAI, model: str) -> None:
    alone = [client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0) for prompt in (PROMPT, "One, two, three,")]
    both = client.completions.create(model=model, prompt=[PROMPT, "One, two, three,"], max_tokens=4, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]


def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


async def test_the_async_client_chats_and_streams(async_client: openai.AsyncOpenAI) -> None:
    model = (await async_client.models.list()).data[0].id
    whole = await async_client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0)
    stream = await async_client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert streamed == whole.choices[0].message.content


async def test_the_async_client_completes_and_streams(async_client: openai.AsyncOpenAI) -> None:
    model = (await async_client.models.list()).data[0].id
    whole = await async_client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
    stream = await async_client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


def test_a_mistake_raises_the_clients_own_error_with_the_parameter(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no-such-model", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
