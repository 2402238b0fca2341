"""The synchronous client.

It stands on gRPC's synchronous channel rather than on a hidden event loop: threads share it freely, Ctrl-C ends a wait, and no thread of
ours runs beside the caller's. It owns the channel, which dials at the first call; requests and answers are shaped in the modules that
`async_client.py` shares.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import grpc
from trivet_proto.call_errors import FailedCall
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

from trivet_client import requests
from trivet_client.connection import Tls, connection_to
from trivet_client.errors import closed, misused, typed_failure
from trivet_client.messages import AnyTool, Conversation
from trivet_client.models import Embeddings, Model, Tokens, embeddings_of, model_of, tokens_of
from trivet_client.results import Answer, collect
from trivet_client.retrying import Attempts, RetryPolicy, deadline_of
from trivet_client.sampling import DEFAULT_SAMPLING, SamplingParams
from trivet_client.stream import EventStream, Response

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_RETRY = RetryPolicy()
CLIENT_CLOSED = "the client is closed"

Q = TypeVar("Q")
R = TypeVar("R")
E = TypeVar("E", bound=Response)


class Client:
    """Calls a Trivet frontend's gRPC API at `address`: `host:port`, `[v6]:port` or `unix:/path`.

    `timeout`: seconds that each call may take, from its sending to its last event and over all attempts; absent: no limit. Every method
    takes one of its own; `math.inf` there is none. `retry` says when a call is made again. Threads may share a client. It does not
    survive a fork: make one in each process, and start processes by spawning where a client was used before.

    Raises `InvalidRequestError` for an address, key or file that cannot be right; nothing is dialled before the first call. Every method
    raises the errors of `trivet_client.errors`.
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
        connection = connection_to(address, tls=tls, api_key=api_key)
        self._timeout = deadline_of(timeout, None)
        self._retry = retry
        self._metadata = connection.metadata
        self._process = os.getpid()
        self._closing = threading.Event()
        if connection.credentials is None:
            self._channel = grpc.insecure_channel(connection.target, options=connection.options)
        else:
            self._channel = grpc.secure_channel(connection.target, connection.credentials, options=connection.options)
        self._stub = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and hang up. A second call does nothing; calls after it raise `CancelledCallError`."""
        self._closing.set()
        self._channel.close()

    def chat(
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
        return collect(stream)

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
    ) -> EventStream:
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
        return self._stream(self._stub.Chat, request, timeout)

    def complete(
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
        return collect(stream)

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
    ) -> EventStream:
        """`complete`, event by event; the request is sent at the first read."""
        request = requests.complete_request(
            prompt, sampling, model=model, echo=echo, add_special_tokens=add_special_tokens, request_id=request_id
        )
        return self._stream(self._stub.Complete, request, timeout)

    def tokenize(
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
        return tokens_of(self._ask(self._stub.Tokenize, request, timeout))

    def tokenize_chat(
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
        return tokens_of(self._ask(self._stub.Tokenize, request, timeout))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """The text of tokens; special ones are part of it unless `skip_special_tokens`."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return self._ask(self._stub.Detokenize, request, timeout).text

    def embed(
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
        return embeddings_of(self._ask(self._stub.Embed, request, timeout))

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Every name that the server answers to."""
        return tuple(map(model_of, self._ask(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout).models))

    def model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """The model of that name, or the only one. Raises `NotFoundError`."""
        return model_of(self._ask(self._stub.GetModel, requests.get_model_request(name), timeout).model)

    def _stream(self, method: "grpc.UnaryStreamMultiCallable[Q, E]", request: Q, timeout: float | None) -> EventStream:
        deadline = deadline_of(timeout, self._timeout)

        def start(remaining: float | None) -> "grpc._CallIterator[E]":
            self._refuse_misuse()
            return method(request, timeout=remaining, metadata=self._metadata)

        return EventStream(start, lambda: Attempts(self._retry, deadline))

    def _ask(self, method: "grpc.UnaryUnaryMultiCallable[Q, R]", request: Q, timeout: float | None) -> R:
        attempts = Attempts(self._retry, deadline_of(timeout, self._timeout))
        while True:
            self._refuse_misuse()
            try:
                return method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as failure:
                error = typed_failure(cast(FailedCall, failure))
                wait = attempts.wait_after(error)
                if wait is None:
                    raise error from failure
            self._closing.wait(wait)

    def _refuse_misuse(self) -> None:
        if self._closing.is_set():
            raise closed(CLIENT_CLOSED)
        refuse_other_process(self._process)


def refuse_other_process(process: int) -> None:
    """Raise where a client that was made in `process` is used in a fork of it."""
    if os.getpid() != process:
        raise misused("the client was made in another process, and gRPC does not survive a fork: make one here, in a spawned process")
