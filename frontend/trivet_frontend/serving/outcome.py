"""What a request gives, before any skin: typed deltas and totals that HTTP and gRPC both write out."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability; `top` holds the most probable tokens at its place, most probable first, with no `top` of their own.

    The first token of a prompt has no probability, for nothing comes before it: `logprob` is then None.
    """

    token: str
    token_id: int
    logprob: float | None
    rank: int | None
    token_bytes: bytes
    top: tuple["TokenLogprob", ...] = ()


@dataclass(slots=True)
class ChoiceDelta:
    """What is new in one choice. Text, ids and logprobs in it belong together; nothing of it is ever taken back."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    # Tokens of this choice so far, this delta's included.
    completion_tokens: int = 0
    finish_reason: str | None = None
    # The stop string, or the stop token's id, that ended the choice.
    stop_reason: str | int | None = None
    # On a choice's first delta, if asked for: one entry per prompt token, the first of them None.
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request: every prompt counts once, whatever its number of choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as the engine takes it, and its text where an echo was asked for."""

    token_ids: list[int]
    text: str = ""
