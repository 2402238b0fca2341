"""`trivet.v1.InferenceService`: the public gRPC API over the same road as HTTP.

An error before the first event is the call's status; after it an `error` event ends the stream, and so does the call's status. Cancelling
a call, or its deadline, aborts the request.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

from trivet_chassis.logging import request_id
from trivet_chassis.request_ids import accepted_request_id
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceServicer

from trivet_frontend.rpc import wire
from trivet_frontend.serving import Generation, Inference


class PublicInference(InferenceServiceServicer):
    """Wire to `Inference` and back."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:
        options = replace(wire.options_of(request.params, least_max_tokens=1), timeout_s=context.time_remaining())
        chat = wire.chat_of(request)
        with self._inference.streams.open():
            generation = await self._inference.chat(chat, options, model=request.model or None, request_id=_request_id(request))
            async with contextlib.aclosing(_events(generation, request.params)) as events:
                async for event in events:
                    yield inference_pb2.ChatResponse(event=event)

    async def Complete(self, request: inference_pb2.CompleteRequest, context: Any) -> AsyncIterator[inference_pb2.CompleteResponse]:
        options = replace(wire.options_of(request.params, least_max_tokens=0), timeout_s=context.time_remaining())
        completion = wire.completion_of(request)
        with self._inference.streams.open():
            generation = await self._inference.complete(completion, options, model=request.model or None, request_id=_request_id(request))
            async with contextlib.aclosing(_events(generation, request.params)) as events:
                async for event in events:
                    yield inference_pb2.CompleteResponse(event=event)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        model = self._inference.model(request.model or None)
        kind = request.WhichOneof("input")
        if kind is None:
            raise wire.refuse("input", "text or chat is required")
        if kind == "chat":
            token_ids = await self._inference.tokenize_chat(wire.tokenized_chat_of(request.chat), model=request.model or None)
        else:
            add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await self._inference.tokenize(request.text, add_special_tokens=add_special_tokens, model=request.model or None)
        return inference_pb2.TokenizeResponse(
            token_ids=pack_i32(token_ids),
            tokens=model.language.token_texts(token_ids) if request.return_token_strings else [],
            max_model_len=model.description.max_model_len,
        )

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Any) -> inference_pb2.DetokenizeResponse:
        text = self._inference.detokenize(
            unpack_i32(request.token_ids, "token_ids").tolist(),
            skip_special_tokens=request.skip_special_tokens,
            model=request.model or None,
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        model = self._inference.model(request.model or None)
        tasks = ", ".join(model.description.tasks)
        raise TrivetError(ErrorKind.UNIMPLEMENTED, f"{model.names[0]} does not serve embed; it serves {tasks}", param="model")

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> inference_pb2.ListModelsResponse:
        model = self._inference.model(None)
        return inference_pb2.ListModelsResponse(models=[wire.public_model(model, name) for name in model.names])

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.GetModelResponse:
        model = self._inference.model(request.model or None)
        return inference_pb2.GetModelResponse(model=wire.public_model(model, request.model or model.names[0]))


async def _events(generation: Generation, params: inference_pb2.GenerationParams) -> AsyncGenerator[inference_pb2.GenerationEvent, None]:
    """The events of a generation, which is closed whatever happens."""
    started = False
    try:
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if not started:
                    yield _started(generation)
                    started = True
                for event in wire.prompt_events(delta):
                    yield event
                if delta.text or delta.logprobs or (params.return_token_ids and delta.token_ids):
                    yield wire.text_event(delta, with_ids=params.return_token_ids)
                if delta.finish_reason is not None:
                    yield wire.finished_event(delta, generation.usage)
    except TrivetError as error:
        if started:
            yield inference_pb2.GenerationEvent(error=error.to_proto())
        raise
    finally:
        generation.close()


def _started(generation: Generation) -> inference_pb2.GenerationEvent:
    started = inference_pb2.Started(
        request_id=generation.request_id,
        model=generation.model_name,
        prompt_tokens=generation.usage.prompt_tokens,
        system_fingerprint=generation.model.system_fingerprint,
    )
    return inference_pb2.GenerationEvent(started=started)


def _request_id(request: inference_pb2.ChatRequest | inference_pb2.CompleteRequest) -> str:
    """The id of the message, else the call's own, which is the metadata's `x-request-id` or a fresh one."""
    return accepted_request_id(request.request_id or request_id.get())
