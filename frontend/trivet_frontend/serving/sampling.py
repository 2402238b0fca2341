"""From a caller's wishes to the engine's parameters: ranges, defaults, and what the lengths allow.

Pure functions over plain values. Every refusal names the field and says what would have been right. The same rules hold on HTTP and gRPC:

* temperature is at most 2; a seed may be any 64-bit integer and is read modulo 2^64, so -1 and 2^64 - 1 are one seed;
* prompt and max_tokens together must fit the context: too long a wish is refused, not shortened.
"""

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine import SamplingParams
from trivet_frontend.serving.options import GenerationOptions

logger = logging.getLogger(__name__)

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_STOP_TOKEN_IDS = 4096
MAX_ALLOWED_TOKEN_IDS = 131072
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_TEMPERATURE = 2.0
MAX_REPETITION_PENALTY = 100.0
PRIORITY_LIMIT = 2**31
# No vocabulary has longer tokens. A text that could not fit even so is refused before the work of tokenizing it.
MAX_CHARACTERS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request says nothing: the model's own `generation_config`, or neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


def defaults_from(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults that a `generation_config.json` gives; useless ones (wrong type, out of range) are warned of and count as absent."""

    def number(name: str, neutral: float, *, least: float, most: float) -> float:
        value = generation_config.get(name)
        if value is None:
            return neutral
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            message = "the model's generation_config.json: %s is %.60r, expected a number from %g to %g; it counts as absent"
            logger.warning(message, name, value, least, most)
            return neutral
        return float(value)

    max_tokens = int(number("max_new_tokens", 0, least=0, most=2**31))
    return SamplingDefaults(
        temperature=number("temperature", 1.0, least=0.0, most=MAX_TEMPERATURE),
        top_p=number("top_p", 1.0, least=1e-6, most=1.0),
        top_k=int(number("top_k", 0, least=0, most=2**31)),
        min_p=number("min_p", 0.0, least=0.0, most=1.0),
        repetition_penalty=number("repetition_penalty", 1.0, least=1e-6, most=MAX_REPETITION_PENALTY),
        max_tokens=max_tokens or None,
    )


def refuse(param: str, message: str) -> TrivetError:
    """An INVALID_ARGUMENT whose message begins with the field."""
    return TrivetError(ErrorKind.INVALID_ARGUMENT, f"{param} {message}", param=param)


def check_options(options: GenerationOptions, *, vocab_size: int, max_logprobs: int) -> None:
    """Refuse what is wrong whatever the prompt; done before any prompt is tokenized."""
    _check_number("temperature", options.temperature, least=0.0, most=MAX_TEMPERATURE)
    _check_number("top_p", options.top_p, least=0.0, most=1.0, least_included=False)
    _check_number("min_p", options.min_p, least=0.0, most=1.0)
    _check_number("presence_penalty", options.presence_penalty, least=-2.0, most=2.0)
    _check_number("frequency_penalty", options.frequency_penalty, least=-2.0, most=2.0)
    _check_number("repetition_penalty", options.repetition_penalty, least=0.0, most=MAX_REPETITION_PENALTY, least_included=False)
    if options.top_k is not None and options.top_k < -1:
        raise refuse("top_k", f"must be at least 1, or 0 or -1 for all tokens, not {_short(options.top_k)}")
    if options.max_tokens is not None and options.max_tokens < options.least_max_tokens:
        raise refuse(options.max_tokens_param, f"must be at least {options.least_max_tokens}, not {_short(options.max_tokens)}")
    _check_integer("min_tokens", options.min_tokens, least=0, most=None)
    if options.min_tokens and options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise refuse("min_tokens", f"must be at most {options.max_tokens_param} ({options.max_tokens}), not {_short(options.min_tokens)}")
    _check_integer("n", options.n, least=1, most=MAX_N)
    _check_integer("seed", options.seed, least=-(2**63), most=2**64 - 1)
    _check_integer("priority", options.priority, least=-PRIORITY_LIMIT, most=PRIORITY_LIMIT - 1)
    _check_integer(options.logprobs_param, options.logprobs, least=0, most=max_logprobs)
    _check_integer("prompt_logprobs", options.prompt_logprobs, least=0, most=max_logprobs)
    _check_strings("stop", options.stop, most=MAX_STOP_STRINGS)
    _check_strings("bad_words", options.bad_words, most=MAX_BAD_WORDS)
    check_token_ids("stop_token_ids", options.stop_token_ids, vocab_size=vocab_size, most=MAX_STOP_TOKEN_IDS)
    if options.allowed_token_ids is not None:
        if not options.allowed_token_ids:
            raise refuse("allowed_token_ids", "must not be empty: no token could be generated")
        check_token_ids("allowed_token_ids", options.allowed_token_ids, vocab_size=vocab_size, most=MAX_ALLOWED_TOKEN_IDS)
    if options.cache_salt is not None and not 0 < len(options.cache_salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise refuse("cache_salt", f"must have 1 to {MAX_CACHE_SALT_CHARACTERS} characters")
    check_characters("cache_salt", options.cache_salt or "")
    parse_logit_bias(options.logit_bias, vocab_size=vocab_size)


def parse_logit_bias(logit_bias: Mapping[str, float] | None, *, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; raises `TrivetError` naming the id or value at fault."""
    if not logit_bias:
        return ()
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise refuse("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries, not {len(logit_bias)}")
    pairs = []
    for key, bias in logit_bias.items():
        # int() would also take "1_0" and " 5 ".
        token_id = int(key) if key.isascii() and key.removeprefix("-").isdigit() and len(key) < 12 else None
        if token_id is None:
            raise refuse("logit_bias", f"must have token ids as keys, not {key[:32]!r}")
        if not 0 <= token_id < vocab_size:
            raise refuse("logit_bias", f"names token {token_id}, which is not in the vocabulary of {vocab_size} tokens")
        if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
            raise refuse("logit_bias", f"must have values from -100 to 100, not {bias:g} (token {token_id})")
        pairs.append((token_id, float(bias)))
    return tuple(pairs)


def resolve_sampling(
    options: GenerationOptions,
    *,
    defaults: SamplingDefaults,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    bad_words: tuple[tuple[int, ...], ...],
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The engine's parameters for a prompt of `prompt_tokens`; `options` have passed `check_options`."""
    max_tokens = fitting_max_tokens(options, defaults=defaults, prompt_tokens=prompt_tokens, max_model_len=max_model_len)
    top_k = _said(options.top_k, defaults.top_k)
    return SamplingParams(
        seed=secrets.randbits(64) if options.seed is None else options.seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=min(options.min_tokens or 0, max_tokens),
        temperature=_said(options.temperature, defaults.temperature),
        top_p=_said(options.top_p, defaults.top_p),
        top_k=0 if top_k <= 0 else min(top_k, vocab_size),
        min_p=_said(options.min_p, defaults.min_p),
        presence_penalty=_said(options.presence_penalty, 0.0),
        frequency_penalty=_said(options.frequency_penalty, 0.0),
        repetition_penalty=_said(options.repetition_penalty, defaults.repetition_penalty),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        logit_bias=parse_logit_bias(options.logit_bias, vocab_size=vocab_size),
        allowed_token_ids=tuple(options.allowed_token_ids or ()),
        bad_words=bad_words,
        processor_arguments=msgspec.json.encode(options.processor_arguments) if options.processor_arguments else b"",
        logprobs=options.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_text(text: str, *, param: str, max_model_len: int) -> None:
    """Refuse a text that is none, or that is far beyond the context whatever its tokens are."""
    if len(text) > MAX_CHARACTERS_PER_TOKEN * max_model_len:
        least = len(text) // MAX_CHARACTERS_PER_TOKEN
        raise TrivetError(
            ErrorKind.INVALID_ARGUMENT,
            f"the prompt has {len(text)} characters, which is more than {least} tokens, but the model's context is {max_model_len} tokens",
            param=param,
        )
    check_characters(param, text)


def check_characters(param: str, text: str) -> None:
    """Refuse half a surrogate pair, which a `str` can hold but no text: HTTP and gRPC do not even carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse(param, f"has {text[error.start]!a} at character {error.start}, half a surrogate pair, which is no text") from None


def fitting_max_tokens(options: GenerationOptions, *, defaults: SamplingDefaults, prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens may be generated; refuses a prompt or a wish that does not fit the context."""
    if prompt_tokens > max_model_len or (prompt_tokens == max_model_len and options.max_tokens != 0):
        raise TrivetError(
            ErrorKind.INVALID_ARGUMENT,
            f"the prompt has {prompt_tokens} tokens, but the model's context is {max_model_len} tokens and must hold the answer too",
            param="prompt" if options.least_max_tokens == 0 else "messages",
        )
    room = max_model_len - prompt_tokens
    if options.max_tokens is None:
        return room if defaults.max_tokens is None else min(room, defaults.max_tokens)
    if options.max_tokens > room:
        raise TrivetError(
            ErrorKind.INVALID_ARGUMENT,
            f"{options.max_tokens_param} is {_short(options.max_tokens)} and the prompt has {prompt_tokens} tokens, "
            f"but the model's context is {max_model_len} tokens",
            param=options.max_tokens_param,
        )
    return options.max_tokens


def _said(value: Any, default: Any) -> Any:
    return default if value is None else value


def _short(value: int) -> str:
    """A number for an error message: a client may send one of a million digits."""
    return str(value) if -(10**18) < value < 10**18 else "a number beyond 64 bits"


def _check_number(param: str, value: float | None, *, least: float, most: float, least_included: bool = True) -> None:
    if value is None:
        return
    if not math.isfinite(value):
        raise refuse(param, "must be a finite number")
    if value > most or value < least or (value == least and not least_included):
        raise refuse(param, f"must be {'at least' if least_included else 'greater than'} {least:g} and at most {most:g}, not {value:g}")


def _check_integer(param: str, value: int | None, *, least: int, most: int | None) -> None:
    if value is None:
        return
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise refuse(param, f"must be at least {least}{upper}, not {_short(value)}")


def _check_strings(param: str, values: Sequence[str], *, most: int) -> None:
    if len(values) > most:
        raise refuse(param, f"must have at most {most} entries, not {len(values)}")
    for value in values:
        if not value:
            raise refuse(param, "must not be or hold an empty string")
        if len(value) > MAX_STOP_STRING_CHARACTERS:
            raise refuse(param, f"must have strings of at most {MAX_STOP_STRING_CHARACTERS} characters, not {len(value)}")
        check_characters(param, value)


def check_token_ids(param: str, values: Sequence[int], *, vocab_size: int, most: int) -> None:
    if len(values) > most:
        raise refuse(param, f"must have at most {most} entries, not {len(values)}")
    for value in values:
        if not 0 <= value < vocab_size:
            raise refuse(param, f"has {_short(value)}, which is not in the vocabulary of {vocab_size} tokens")
