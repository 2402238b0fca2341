"""A generation read to its end, for answers that come whole."""

import contextlib
from dataclasses import dataclass, field

from trivet_frontend.serving import Generation, TokenLogprob


@dataclass(slots=True)
class Collected:
    """One choice, whole."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def collect(generation: Generation) -> list[Collected]:
    """Every choice by index; raises the error that ended the generation."""
    choices = [Collected() for _ in range(generation.choice_count)]
    async with contextlib.aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choice = choices[delta.index]
            choice.pieces.append(delta.text)
            choice.token_ids.extend(delta.token_ids)
            if delta.logprobs is not None:
                if choice.logprobs is None:
                    choice.logprobs = []
                choice.logprobs.extend(delta.logprobs)
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    return choices
