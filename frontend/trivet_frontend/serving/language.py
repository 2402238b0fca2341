"""What the road needs of a model's language: its tokenizer, its template, its text. `model.py` has the real one; this is the shape."""

from collections.abc import Sequence
from typing import Protocol

from trivet_frontend.engine import TokenLogprobs
from trivet_frontend.serving.choice import OutputText
from trivet_frontend.serving.options import ChatInput, GenerationOptions
from trivet_frontend.serving.outcome import TokenLogprob


class Language(Protocol):
    """Text to tokens and back, for one model. Refusals are `TrivetError`s that name the field."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    async def encode_chat(self, chat: ChatInput) -> list[int]: ...

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def output_text(self, prompt_ids: Sequence[int], options: GenerationOptions) -> OutputText: ...

    def describe_logprobs(self, rows: TokenLogprobs, top: int) -> list[TokenLogprob]: ...
