"""What a prompt gave: its choices, whole."""

from dataclasses import dataclass

from trivet_proto.errors import TrivetError

from trivet_frontend.serving import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice. `finish_reason` is `stop` or `length`, and None where the request failed before its end.

    `stop_reason` is the stop string or the stop token of the request that ended it; `logprobs` has one entry a token, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt's answer: `n` outputs, and no `error`; or the error that ended it, with what there was until then.

    `prompt` is the text, if that was given. `prompt_logprobs` has one entry a prompt token, of which the first is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: TrivetError | None = None
