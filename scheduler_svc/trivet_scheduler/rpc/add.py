"""From the `Add` message to what the core takes: checked, so that no request can break a step that others share.

The frontend has checked what a user wrote. A frontend is another program, perhaps of another version: whatever could make the model's step
fail is refused here again, on the request's own handles.
"""

from collections.abc import Callable
from math import isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_PROMPT_LOGPROBS
from trivet_proto.packing import unpack_f32, unpack_i32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.kv.hashing import HashKeys
from trivet_scheduler.request import RequestSpec, Resume

UID_BYTES = 16

Ranged = Literal["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]

RANGES: tuple[tuple[Ranged, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "0 or more"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "0 to 1"),
    ("presence_penalty", isfinite, "finite"),
    ("frequency_penalty", isfinite, "finite"),
    ("repetition_penalty", lambda value: value > 0, "above 0"),
)


def spec_of(add: engine_pb2.Add, children: int, card: types_pb2.ModelCard, clock: Clock) -> RequestSpec:
    """Raises INVALID_ARGUMENT for what can never run, UNIMPLEMENTED for what this build does not serve."""
    _refuse_unserved(add)
    if len(add.uid) != UID_BYTES:
        raise invalid(f"the uid has {len(add.uid)} bytes, {UID_BYTES} are needed", "uid")
    prompt = np.array(_token_ids(add.prompt_token_ids, "prompt", card.vocab_size))
    sampling = add.sampling
    check_sampling(sampling, card)
    stop_ids = set(unpack_i32(sampling.stop_token_ids, "stop_token_ids").tolist())
    if not sampling.ignore_eos:
        stop_ids |= set(unpack_i32(card.eos_token_ids).tolist())
    return RequestSpec(
        uid=add.uid,
        request_id=add.request_id,
        prompt=prompt,
        sampling=sampling,
        keys=HashKeys(salt=add.cache_salt.encode()),
        num_children=children,
        stop_ids=frozenset(stop_ids),
        min_tokens=sampling.min_tokens,
        read_prefix_cache=not add.skip_reading_prefix_cache,
        priority=add.priority,
        deadline=clock.monotonic() + add.timeout_ms / 1000 if add.HasField("timeout_ms") else None,
    )


def resume_of(add: engine_pb2.Add, vocab_size: int) -> list[Resume]:
    """What each child had before another scheduler lost it; empty for a new request."""
    return [
        Resume(
            output=_token_ids(state.output_token_ids, "resume", vocab_size).tolist(),
            done=state.done,
            prompt_logprobs_reported=state.prompt_logprobs_reported,
            cached_tokens_reported=state.cached_tokens_reported,
            timing_reported=state.timing_reported,
        )
        for state in add.resume
    ]


def _refuse_unserved(add: engine_pb2.Add) -> None:
    if add.task not in (types_pb2.TASK_UNSPECIFIED, types_pb2.TASK_GENERATE):
        known = add.task in types_pb2.Task.values()
        name = types_pb2.Task.Name(add.task) if known else f"task {add.task}"
        raise TrivetError(ErrorKind.UNIMPLEMENTED, f"the model does not serve {name}; it serves generation")
    if add.HasField("structured_output"):
        raise TrivetError(ErrorKind.UNIMPLEMENTED, "structured output is not served yet", param="structured_output")
    if add.media or add.adapter:
        raise TrivetError(ErrorKind.UNIMPLEMENTED, "the model takes no media and no adapters")


def check_sampling(sampling: types_pb2.SamplingParams, card: types_pb2.ModelCard) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    for field, is_right, right in RANGES:
        value = getattr(sampling, field)
        if sampling.HasField(field) and not (isfinite(value) and is_right(value)):
            raise invalid(f"{field} is {value:g}; {right} is right", field)
    vocabulary = card.vocab_size
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        _token_ids(getattr(sampling, name), name, vocabulary)
    biased = _token_ids(sampling.logit_bias_ids, "logit_bias", vocabulary)
    values = unpack_f32(sampling.logit_bias_values, "logit_bias")
    if len(values) != len(biased) or not np.isfinite(values).all():
        raise invalid(f"logit_bias has {len(biased)} ids and {len(values)} values; one finite value for each id is right", "logit_bias")
    words = _token_ids(sampling.bad_words_ids, "bad_words", vocabulary)
    counts = unpack_i32(sampling.bad_words_counts, "bad_words")
    if (counts < 1).any() or int(counts.sum(dtype=np.int64)) != len(words):
        raise invalid(f"bad_words has {len(words)} ids, and counts that do not add up to them or are below 1", "bad_words")
    for name in ("logprobs", "prompt_logprobs"):
        if card.max_logprobs and getattr(sampling, name) > card.max_logprobs:
            raise invalid(f"{name} is {getattr(sampling, name)}; at most {card.max_logprobs} are given", name)
    if sampling.prompt_logprobs > MAX_PROMPT_LOGPROBS:
        raise invalid(f"prompt_logprobs is {sampling.prompt_logprobs}; at most {MAX_PROMPT_LOGPROBS} are given", "prompt_logprobs")
    chosen = len(unpack_i32(sampling.logprob_token_ids))
    for name, count in (("all_logprobs", vocabulary if sampling.all_logprobs else 0), ("logprob_token_ids", chosen)):
        if card.max_logprobs and count > card.max_logprobs:
            raise invalid(f"{name} wants {count} log probabilities a token; at most {card.max_logprobs} are given", name)


def _token_ids(data: bytes, name: str, vocab_size: int) -> NDArray[np.int32]:
    ids = unpack_i32(data, name)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise invalid(f"a token id in {name} is not in the vocabulary of {vocab_size}", name)
    return ids
