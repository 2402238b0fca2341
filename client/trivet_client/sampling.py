"""How an answer is sampled: the fields of the OpenAI API and of vLLM. What is left out takes the model's default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from trivet_proto.v1 import inference_pb2

from trivet_client.errors import invalid
from trivet_client.fields import set_field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. The server judges the values and refuses with the field's name what is outside its range.

    - `max_tokens`, `min_tokens`: length of the answer in tokens. Absent: up to the model's own limit or the end of the context.
    - `temperature` (0 is greedy), `top_p`, `top_k` (−1: all), `min_p`: from how many candidates the next token is drawn.
    - `presence_penalty`, `frequency_penalty` (generated tokens), `repetition_penalty` (prompt too): against repeating.
    - `seed`: the same seed gives the same tokens, −2^63 to 2^64 − 1. Absent: drawn at random.
    - `stop`: text or texts that end the answer; `stop_token_ids` the same in tokens; `ignore_eos` goes on past the model's own end.
    - `include_stop_str_in_output`: whether the stop text is part of the answer.
    - `logit_bias`: token id, as number or text → −100 to 100; `bad_words`, `allowed_token_ids`: what is never, or alone, sampled.
    - `logprobs`: log probability of each token and of so many rivals; 0: of the token alone. `prompt_logprobs`: the same for the prompt.
    - `n`: number of choices.
    - `skip_special_tokens`, `spaces_between_special_tokens`: how special tokens appear in text.
    - `return_token_ids`: answers carry token ids beside text.
    - `priority`: lower runs first where the server orders by priority. `cache_salt`: prompts of another salt share no KV cache.
    """

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
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


DEFAULT_SAMPLING = SamplingParams()

MAX_DIGITS = 12

_SPECIAL = {"seed", "stop", "logit_bias", "bad_words", "allowed_token_ids"}
_PLAIN = tuple(field.name for field in fields(SamplingParams) if field.name not in _SPECIAL)


def params_of(sampling: SamplingParams) -> inference_pb2.GenerationParams:
    """Raises `InvalidRequestError` for what cannot be sent."""
    params = inference_pb2.GenerationParams()
    for name in _PLAIN:
        set_field(params, name, getattr(sampling, name))
    if sampling.seed is not None:
        set_field(params, "seed", _signed(sampling.seed))
    set_field(params, "stop", [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop)
    if isinstance(sampling.bad_words, str):
        raise invalid(f"bad_words: {sampling.bad_words!r} is one text; it takes a list of texts", "bad_words")
    set_field(params, "bad_words", sampling.bad_words)
    if sampling.allowed_token_ids is not None:
        if len(sampling.allowed_token_ids) == 0:
            # An empty list and none look alike on the wire.
            raise invalid("allowed_token_ids is empty: no token could be sampled; leave it out to allow all", "allowed_token_ids")
        set_field(params, "allowed_token_ids", sampling.allowed_token_ids)
    for token_id, bias in (sampling.logit_bias or {}).items():
        entry = params.logit_bias.add()
        set_field(entry, "token_id", _token_id(token_id), param="logit_bias")
        set_field(entry, "bias", bias, param="logit_bias")
    return params


def _token_id(key: int | str) -> int:
    if not isinstance(key, str):
        return key
    if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < MAX_DIGITS):
        raise invalid(f"logit_bias: {key[:32]!r} is no token id, which is a whole number", "logit_bias")
    return int(key)


def _signed(seed: int) -> int:
    """The field has 64 bits with a sign; seeds are read modulo 2^64."""
    return seed - 2**64 if isinstance(seed, int) and 2**63 <= seed < 2**64 else seed
