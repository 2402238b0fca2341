"""`POST /v1/chat/completions`: a generation written out as one answer or as chunks."""

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from trivet_frontend.openai.blocks import chat_logprobs, prompt_logprobs, usage_block
from trivet_frontend.openai.collecting import Collected
from trivet_frontend.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessageBlock,
    UsageBlock,
    encode,
)
from trivet_frontend.openai.schema import ChatBody
from trivet_frontend.openai.sse import DONE, event
from trivet_frontend.serving import ChoiceDelta, Generation


def chat_answer(generation: Generation, choices: list[Collected], body: ChatBody) -> bytes:
    """The whole answer."""
    shown = prompt_logprobs(choices[0].prompt_logprobs) if choices[0].prompt_logprobs is not None else msgspec.UNSET
    return encode(
        ChatAnswer(
            id=f"chatcmpl-{generation.answer_id}",
            created=generation.created,
            model=generation.model_name,
            system_fingerprint=generation.model.system_fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessageBlock("assistant", choice.text),
                    logprobs=chat_logprobs(choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_block(generation.usage),
            prompt_logprobs=shown,
            prompt_token_ids=generation.prompt_of(0).token_ids if body.return_token_ids else msgspec.UNSET,
        )
    )


class ChatChunks:
    """Writes the chunks of one stream."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._generation = generation
        self._with_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_running_usage = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        self._with_logprobs = bool(body.logprobs)

    async def events(self, first: ChoiceDelta | None, rest: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """Role chunks, a chunk per delta, the usage chunk, the end. Closes `rest`."""
        roles = [self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]) for index in self._indices]
        async with contextlib.aclosing(rest):
            # What is ready at once leaves in one write.
            yield b"".join(roles) + (self._delta(first) if first is not None else b"")
            async for delta in rest:
                if piece := self._delta(delta):
                    yield piece
        last = b""
        if self._with_usage:
            last = event(encode(self._base([], usage=usage_block(self._generation.usage))))
        yield last + DONE

    @property
    def _indices(self) -> range:
        return range(self._generation.choice_count)

    def _delta(self, delta: ChoiceDelta) -> bytes:
        pieces = []
        if delta.text or (self._with_logprobs and delta.logprobs) or (self._with_ids and delta.token_ids):
            choice = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text),
                logprobs=chat_logprobs(delta.logprobs) if self._with_logprobs else None,
                token_ids=delta.token_ids if self._with_ids else msgspec.UNSET,
            )
            pieces.append(self._chunk([choice]))
        if delta.finish_reason is not None:
            choice = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            pieces.append(self._chunk([choice]))
        return b"".join(pieces)

    def _chunk(self, choices: list[ChatChunkChoice]) -> bytes:
        if not self._with_usage:
            return event(encode(self._base(choices, usage=msgspec.UNSET)))
        usage = usage_block(self._generation.usage) if self._with_running_usage else None
        return event(encode(self._base(choices, usage=usage)))

    def _base(self, choices: list[ChatChunkChoice], *, usage: UsageBlock | msgspec.UnsetType | None) -> ChatChunk:
        generation = self._generation
        return ChatChunk(
            id=f"chatcmpl-{generation.answer_id}",
            created=generation.created,
            model=generation.model_name,
            system_fingerprint=generation.model.system_fingerprint,
            choices=choices,
            usage=usage,
        )
