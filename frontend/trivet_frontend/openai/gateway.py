"""The handlers of the HTTP API: read, decode, ask `Inference`, write.

Nothing here judges a request's meaning. A handler that waits for the engine is always raced against its client's leaving.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from trivet_chassis.progress import Progress
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.openai.body import read_body
from trivet_frontend.openai.chat import ChatChunks, chat_answer
from trivet_frontend.openai.collecting import Collected, collect
from trivet_frontend.openai.completions import CompletionChunks, completion_answer
from trivet_frontend.openai.decoding import UnknownFields, decode_body
from trivet_frontend.openai.middleware import REQUEST_ID_KEY
from trivet_frontend.openai.options import chat_input, chat_options, completion_input, completion_options, refuse
from trivet_frontend.openai.responses import DetokenizeAnswer, ModelBlock, ModelList, TokenizeAnswer, encode
from trivet_frontend.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from trivet_frontend.openai.sse import KEEPALIVE, EventStream, StreamLimits, answer_while_connected
from trivet_frontend.serving import ChatInput, ChoiceDelta, Generation, Inference, OpenStreams, ServedModel

# A step of a long prompt may take many seconds on a CPU; the scheduler, which knows what it expects of a step, is stricter.
STUCK_SECONDS = 60.0

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
Events = Callable[[ChoiceDelta | None, AsyncGenerator[ChoiceDelta, None]], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the handlers need of the configuration; sizes in bytes, times in seconds."""

    body_limit: int
    body_timeout: float
    keepalive: float
    slow_client_timeout: float
    unknown_fields: UnknownFields
    version: str


class Gateway:
    """One handler per path."""

    def __init__(self, inference: Inference, registry: CollectorRegistry, settings: GatewaySettings) -> None:
        self._inference = inference
        self._registry = registry
        self._settings = settings

    @property
    def streams(self) -> OpenStreams:
        return self._inference.streams

    # ---- generation ----

    async def chat_completions(self, request: Request) -> Response:
        body = await self._decode(request, ChatBody)
        options, chat = chat_options(body), chat_input(body)

        async def answer() -> Response:
            generation = await self._inference.chat(chat, options, model=body.model, request_id=request.scope[REQUEST_ID_KEY])
            if body.stream:
                return await self._streamed(generation, ChatChunks(generation, body).events)
            return await _whole(generation, lambda choices: chat_answer(generation, choices, body))

        return await answer_while_connected(request, answer)

    async def completions(self, request: Request) -> Response:
        body = await self._decode(request, CompletionBody)
        options, completion = completion_options(body), completion_input(body)

        async def answer() -> Response:
            generation = await self._inference.complete(completion, options, model=body.model, request_id=request.scope[REQUEST_ID_KEY])
            if body.stream:
                return await self._streamed(generation, CompletionChunks(generation, body).events)
            return await _whole(generation, lambda choices: completion_answer(generation, choices, body))

        return await answer_while_connected(request, answer)

    # ---- tokens ----

    async def tokenize(self, request: Request) -> Response:
        body = await self._decode(request, TokenizeBody)
        if (body.prompt is msgspec.UNSET) == (body.messages is msgspec.UNSET):
            raise refuse("prompt", "either prompt or messages is required")
        if body.messages is not msgspec.UNSET:
            chat = ChatInput(
                messages=body.messages,
                tools=body.tools,
                documents=body.documents,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template=body.chat_template,
                chat_template_kwargs=body.chat_template_kwargs,
                add_special_tokens=body.add_special_tokens,
            )
            token_ids = await self._inference.tokenize_chat(chat, model=body.model)
        else:
            if not isinstance(body.prompt, str):
                raise refuse("prompt", "prompt must be a string")
            add_special_tokens = body.add_special_tokens is not False
            token_ids = await self._inference.tokenize(body.prompt, add_special_tokens=add_special_tokens, model=body.model)
        model = self._inference.model(body.model)
        texts = model.language.token_texts(token_ids) if body.return_token_strs else None
        answer = TokenizeAnswer(count=len(token_ids), max_model_len=model.description.max_model_len, tokens=token_ids, token_strs=texts)
        return _json(encode(answer))

    async def detokenize(self, request: Request) -> Response:
        body = await self._decode(request, DetokenizeBody)
        text = self._inference.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens), model=body.model)
        return _json(encode(DetokenizeAnswer(text)))

    # ---- what there is ----

    async def models(self, request: Request) -> Response:
        model = self._inference.model(None)
        return _json(encode(ModelList(data=[_model_block(model, name) for name in model.names])))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _json(encode(_model_block(self._inference.model(name), name)))

    async def version(self, request: Request) -> Response:
        return _json(encode({"version": self._settings.version}))

    async def load(self, request: Request) -> Response:
        return _json(encode({"server_load": self._inference.requests_inside}))

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def live(self, request: Request) -> Response:
        return _json(b'{"status":"live"}')

    async def ready(self, request: Request) -> Response:
        if self._inference.ready:
            return _json(b'{"status":"ready"}')
        if self._inference.draining:
            raise TrivetError(ErrorKind.UNAVAILABLE, "this server is leaving")
        raise TrivetError(ErrorKind.UNAVAILABLE, "no scheduler with a ready worker is connected")

    async def progress(self, request: Request) -> Response:
        found = Progress(*self._inference.progress(), STUCK_SECONDS)
        return Response(found.body, status_code=found.status, media_type="application/json")

    async def _decode(self, request: Request, body_type: type[BodyT]) -> BodyT:
        body = await read_body(request, limit=self._settings.body_limit, timeout_s=self._settings.body_timeout)
        return decode_body(body, body_type, self._settings.unknown_fields)

    async def _streamed(self, generation: Generation, events: Events) -> Response:
        """A stream, once its first delta is there: what fails before is an ordinary error answer.

        If none comes for long, the stream begins without one.
        """
        settings = self._settings
        limits = StreamLimits(keepalive=settings.keepalive, slow_client=settings.slow_client_timeout)
        deltas = generation.deltas()
        beginning = asyncio.ensure_future(anext(deltas, None))
        try:
            await asyncio.wait((beginning,), timeout=settings.keepalive or None)
            if beginning.done():
                written = events(beginning.result(), deltas)
            else:
                deltas = _begun(beginning, deltas)
                written = _after_comment(events(None, deltas))
        except BaseException:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            generation.close()
            raise

        def close() -> None:
            beginning.cancel()
            generation.close()

        return EventStream(written, limits=limits, on_unsent=close)


async def _begun(first: asyncio.Future[ChoiceDelta | None], rest: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[ChoiceDelta, None]:
    """All deltas, the first of which is being waited for."""
    try:
        delta = await first
        if delta is not None:
            yield delta
        async with contextlib.aclosing(rest):
            async for delta in rest:
                yield delta
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await rest.aclose()


async def _after_comment(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`events` behind a comment, which shows that the stream lives."""
    yield KEEPALIVE
    async with contextlib.aclosing(events):
        async for piece in events:
            yield piece


async def _whole(generation: Generation, write: Callable[[list[Collected]], bytes]) -> Response:
    return _json(write(await collect(generation)))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _model_block(model: ServedModel, name: str) -> ModelBlock:
    return ModelBlock(id=name, created=model.created, root=model.root, max_model_len=model.description.max_model_len)
