"""What a caller asked for, before any default: the one form that HTTP bodies and gRPC messages both take.

`None` is "not said". Nothing here is judged; `sampling.py` does that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Sampling and output wishes under the names of the OpenAI API and vLLM."""

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
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # Keys are token ids as text: that is how JSON has them, and what is no id must be named in the error.
    logit_bias: Mapping[str, float] | None = None
    bad_words: Sequence[str] = ()
    # None: all tokens; an empty list is an error.
    allowed_token_ids: Sequence[int] | None = None
    # For the custom logits processors of the workers, which alone know what they mean.
    processor_arguments: Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int | None = None
    cache_salt: str | None = None
    # How long the answer may take from its arrival on, in seconds.
    timeout_s: float | None = None
    # The public names of two fields differ from road to road; errors must use the caller's.
    max_tokens_param: str = "max_tokens"
    logprobs_param: str = "logprobs"
    # A conversation without room for an answer is a mistake; a completion may ask for the echo alone.
    least_max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation and how to render it."""

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    # With `continue_final_message`: the answer begins with the text that it continues.
    echo: bool = False
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionInput:
    """One or several prompts, each text or token ids."""

    prompt: Any
    echo: bool = False
    add_special_tokens: bool = True
