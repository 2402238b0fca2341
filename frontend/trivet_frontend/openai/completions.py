"""`POST /v1/completions`: a generation written out as one answer or as chunks."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

import msgspec

from trivet_frontend.openai.blocks import completion_logprobs, prompt_logprobs, usage_block
from trivet_frontend.openai.collecting import Collected
from trivet_frontend.openai.responses import CompletionAnswer, CompletionChoice, CompletionLogprobs, UsageBlock, encode
from trivet_frontend.openai.schema import CompletionBody
from trivet_frontend.openai.sse import DONE, event
from trivet_frontend.serving import ChoiceDelta, Generation, TokenLogprob


def completion_answer(generation: Generation, choices: list[Collected], body: CompletionBody) -> bytes:
    """The whole answer."""
    return encode(
        CompletionAnswer(
            id=f"cmpl-{generation.answer_id}",
            created=generation.created,
            model=generation.model_name,
            system_fingerprint=generation.model.system_fingerprint,
            choices=[
                CompletionChoice(
                    index=index,
                    text=choice.text,
                    logprobs=completion_logprobs(choice.logprobs, offset=0),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    prompt_logprobs=prompt_logprobs(choice.prompt_logprobs) if choice.prompt_logprobs is not None else msgspec.UNSET,
                    token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
                    prompt_token_ids=generation.prompt_of(index).token_ids if body.return_token_ids else msgspec.UNSET,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_block(generation.usage),
        )
    )


class CompletionChunks:
    """Writes the chunks of one stream."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._generation = generation
        self._with_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_running_usage = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        # Where in each choice's text the next token begins.
        self._offsets = [0] * generation.choice_count

    async def events(self, first: ChoiceDelta | None, rest: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """A chunk per delta, the usage chunk, the end. Closes `rest`."""
        async with contextlib.aclosing(rest):
            if first is not None and (piece := self._delta(first)):
                yield piece
            async for delta in rest:
                if piece := self._delta(delta):
                    yield piece
        last = b""
        if self._with_usage:
            last = event(encode(self._base([], usage=usage_block(self._generation.usage))))
        yield last + DONE

    def _delta(self, delta: ChoiceDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish_reason or (self._with_ids and delta.token_ids)):
            return b""
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._logprobs(delta.logprobs, delta.index),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._with_ids else msgspec.UNSET,
        )
        if not self._with_usage:
            return event(encode(self._base([choice], usage=msgspec.UNSET)))
        usage = usage_block(self._generation.usage) if self._with_running_usage else None
        return event(encode(self._base([choice], usage=usage)))

    def _logprobs(self, rows: Sequence[TokenLogprob] | None, index: int) -> CompletionLogprobs | None:
        if rows is None:
            return None
        block = completion_logprobs(rows, offset=self._offsets[index])
        self._offsets[index] += sum(len(row.token) for row in rows)
        return block

    def _base(self, choices: list[CompletionChoice], *, usage: UsageBlock | msgspec.UnsetType | None) -> CompletionAnswer:
        generation = self._generation
        return CompletionAnswer(
            id=f"cmpl-{generation.answer_id}",
            created=generation.created,
            model=generation.model_name,
            system_fingerprint=generation.model.system_fingerprint,
            choices=choices,
            usage=usage,
        )
