"""The asynchronous client: `client.py` on an event loop.

It owns a channel of grpc.aio, which is made at the first call and belongs to that loop.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc.aio
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

from trivet_client import requests
from trivet_client.async_stream import AsyncEventStream, raise_unless_the_task_is_cancelled
from trivet_client.client import CLIENT_CLOSED, DEFAULT_ADDRESS, DEFAULT_RETRY, refuse_other_process
from trivet_client.connection import Tls, connection_to
from trivet_client.errors import closed, misused, typed_failure
from trivet_client.messages import AnyTool, Conversation
from trivet_client.models import Embeddings, Model, Tokens, embeddings_of, model_of, tokens_of
from trivet_client.results import Answer, collect_async
from trivet_client.retrying import Attempts, RetryPolicy, deadline_of
from trivet_client.sampling import DEFAULT_SAMPLING, SamplingParams

if TYPE_CHECKING:
    from trivet_proto.v1.inference_pb2_grpc import InferenceServiceAsyncStub  # of the stubs' types alone

Q = TypeVar("Q")
R = TypeVar("R")


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods and errors; every method but the streams is awaited.

    One event loop uses a client, the one of its first call; another loop or process needs its own. Cancelling a task cancels its call, and
    the server aborts the request.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self._connection = connection_to(address, tls=tls, api_key=api_key)
        self._timeout = deadline_of(timeout, None)
        self._retry = retry
        self._process = os.getpid()
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: InferenceServiceAsyncStub | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and hang up. A second call does nothing; calls after it raise `CancelledCallError`."""
        self._closing.set()
        if self._channel is not None:
            await self._channel.close()

    async def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        model: str | None = None,
        tools: Sequence[AnyTool] = (),
        tool_choice: str | Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """The model's answer to a conversation, rendered by its chat template.

        `messages` is a text or a list of `Message`s or of the OpenAI API's dicts. `model` may be absent where one is served.
        `add_generation_prompt` is true unless false; `continue_final_message` lets the model go on inside the last message. The server
        refuses a `chat_template` unless it was told to trust requests.
        """
        stream = self.stream_chat(
            messages,
            sampling,
            model=model,
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            reasoning_effort=reasoning_effort,
            request_id=request_id,
            timeout=timeout,
        )
        return await collect_async(stream)

    def stream_chat(
        self,
        messages: Conversation,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        model: str | None = None,
        tools: Sequence[AnyTool] = (),
        tool_choice: str | Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncEventStream:
        """`chat`, event by event; the request is sent at the first read."""
        request = requests.chat_request(
            messages,
            sampling,
            model=model,
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            reasoning_effort=reasoning_effort,
            request_id=request_id,
        )
        return self._stream(lambda stub: stub.Chat, request, timeout)

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        model: str | None = None,
        echo: bool | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """The text that goes on from `prompt`, a text or token ids; `echo` puts the prompt before it."""
        stream = self.stream_complete(
            prompt, sampling, model=model, echo=echo, add_special_tokens=add_special_tokens, request_id=request_id, timeout=timeout
        )
        return await collect_async(stream)

    def stream_complete(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        model: str | None = None,
        echo: bool | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncEventStream:
        """`complete`, event by event; the request is sent at the first read."""
        request = requests.complete_request(
            prompt, sampling, model=model, echo=echo, add_special_tokens=add_special_tokens, request_id=request_id
        )
        return self._stream(lambda stub: stub.Complete, request, timeout)

    async def tokenize(
        self,
        text: str,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        with_texts: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """The tokens of a text; `with_texts` adds each token's own."""
        request = requests.tokenize_request(text, model=model, add_special_tokens=add_special_tokens, with_texts=with_texts)
        return tokens_of(await self._ask(lambda stub: stub.Tokenize, request, timeout))

    async def tokenize_chat(
        self,
        messages: Conversation,
        *,
        model: str | None = None,
        tools: Sequence[AnyTool] = (),
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        with_texts: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """The tokens of the prompt that `chat` makes of a conversation."""
        request = requests.tokenize_chat_request(
            messages,
            model=model,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            with_texts=with_texts,
        )
        return tokens_of(await self._ask(lambda stub: stub.Tokenize, request, timeout))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """The text of tokens; special ones are part of it unless `skip_special_tokens`."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return (await self._ask(lambda stub: stub.Detokenize, request, timeout)).text

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        timeout: float | None = None,
    ) -> Embeddings:
        """A vector for each text, or each list of token ids. Raises `NotServedError` where the model gives none (see `Model.tasks`)."""
        request = requests.embed_request(inputs, model=model, dimensions=dimensions, normalize=normalize)
        return embeddings_of(await self._ask(lambda stub: stub.Embed, request, timeout))

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Every name that the server answers to."""
        return tuple(map(model_of, (await self._ask(lambda stub: stub.ListModels, inference_pb2.ListModelsRequest(), timeout)).models))

    async def model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """The model of that name, or the only one. Raises `NotFoundError`."""
        return model_of((await self._ask(lambda stub: stub.GetModel, requests.get_model_request(name), timeout)).model)

    def _stream(
        self,
        method: "Callable[[InferenceServiceAsyncStub], grpc.aio.UnaryStreamMultiCallable[Q, R]]",
        request: Q,
        timeout: float | None,
    ) -> AsyncEventStream:
        deadline = deadline_of(timeout, self._timeout)

        def start(remaining: float | None) -> "grpc.aio.UnaryStreamCall[Q, R]":
            return method(self._connected())(request, timeout=remaining, metadata=self._connection.metadata)

        return AsyncEventStream(start, lambda: Attempts(self._retry, deadline))

    async def _ask(
        self, method: "Callable[[InferenceServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]]", request: Q, timeout: float | None
    ) -> R:
        attempts = Attempts(self._retry, deadline_of(timeout, self._timeout))
        while True:
            call = method(self._connected())(request, timeout=attempts.remaining(), metadata=self._connection.metadata)
            try:
                return await call
            except grpc.aio.AioRpcError as failure:
                error = typed_failure(failure)
                wait = attempts.wait_after(error)
                if wait is None:
                    raise error from failure
            except asyncio.CancelledError:
                raise_unless_the_task_is_cancelled(CLIENT_CLOSED)
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._closing.wait()

    def _connected(self) -> "InferenceServiceAsyncStub":
        """The stub on this loop's channel. Raises where the client is not to be used."""
        if self._closing.is_set():
            raise closed(CLIENT_CLOSED)
        refuse_other_process(self._process)
        loop = asyncio.get_running_loop()
        if self._stub is None:
            target, credentials, options = self._connection.target, self._connection.credentials, self._connection.options
            if credentials is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
            self._stub = InferenceServiceStub(self._channel)
            self._loop = loop
        if loop is not self._loop:
            raise misused("the client belongs to another event loop: make one in each")
        return self._stub
