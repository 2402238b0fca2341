"""How tokens are chosen, as a caller in Python says it.

Types are judged here; ranges where those of every request are, by the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import get_type_hints

import msgspec
from trivet_proto.errors import invalid

from trivet_frontend.serving import GenerationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names and meanings are those of the completions API. None is "not said": the model's own `generation_config` then holds.

    `logit_bias` has token ids as keys, as numbers or as their text.
    `logprobs` and `prompt_logprobs` are how many of the most probable tokens are told beside each token; 0 tells of the token alone.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT for a value of another type than its field's."""
        kinds = get_type_hints(SamplingParams) | {"logit_bias": Mapping[int | str, float] | None}
        for field in fields(self):
            try:
                msgspec.convert(getattr(self, field.name), type=kinds[field.name])
            except msgspec.ValidationError as error:
                raise invalid(f"{field.name}: {error}", field.name) from None
        for token in self.logit_bias or ():
            if isinstance(token, str) and not (token.isascii() and token.removeprefix("-").isdigit()):
                raise invalid(f"logit_bias: {token[:32]!r} is no token id, which is a whole number", "logit_bias")

    def options(self) -> GenerationOptions:
        """The form that every public API gives its requests."""
        return GenerationOptions(
            n=self.n,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logit_bias=None if self.logit_bias is None else {str(token): float(bias) for token, bias in self.logit_bias.items()},
            bad_words=tuple(self.bad_words),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
