"""What a request and its answer are to the engine: tokens, and how to choose them.

These are plain values. The session (`session.py`) turns them into messages; the rooms above never see a message, and this file never sees
text.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended; the value is the name that the OpenAI API and the metrics use."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class AbortReason(enum.Enum):
    """Why a frontend gives a request up."""

    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    SLOW_CLIENT = "slow_client"
    DRAINING = "draining"
    SIBLING_FAILED = "sibling_failed"
    MOVED = "moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the worker chooses tokens, with every default already filled in."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    processor_arguments: bytes = b""  # a JSON object for custom logits processors
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt and its `n` children. The engine keeps it until the last child ends: a later hand-over needs it.

    `timeout_ms` is what is left of its time, `age_ms` what has passed since it came, both when it is submitted.
    """

    uid: bytes
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    timeout_ms: int | None = None
    age_ms: int = 0
    request_id: str = ""


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log probabilities of consecutive tokens, one row a token.

    A row of `token_ids` and `values` holds the token itself first and then the most probable ones, of which the token itself may be one
    again; `ranks` has one entry a row, the token's own rank (1 is the most probable).
    """

    token_ids: list[list[int]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def extend(self, other: "TokenLogprobs") -> None:
        self.token_ids.extend(other.token_ids)
        self.values.extend(other.values)
        self.ranks.extend(other.ranks)

    def drop(self, count: int) -> None:
        """Forget the first `count` rows."""
        del self.token_ids[:count], self.values[:count], self.ranks[:count]


@dataclass(slots=True)
class TokenDelta:
    """What is new in one child since its reader last looked."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # The stop token that ended the child; it is the last of `token_ids`.
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    # Where in the prompt the first row of `prompt_logprobs` stands: position 0 has none.
    prompt_position: int = 0

    def merge(self, later: "TokenDelta") -> None:
        """Put `later` behind what is already here; a slow reader then gets both at once."""
        self.token_ids.extend(later.token_ids)
        if later.finish_reason is not None:
            self.finish_reason = later.finish_reason
            self.stop_token_id = later.stop_token_id
        if later.cached_tokens is not None:
            self.cached_tokens = later.cached_tokens
        self.logprobs = _joined(self.logprobs, later.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, later.prompt_logprobs)


def _joined(earlier: TokenLogprobs | None, later: TokenLogprobs | None) -> TokenLogprobs | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    earlier.extend(later)
    return earlier
