"""Whether what a step's answer brings can be passed on: token ids are in the vocabulary, logprobs fit their tokens and are numbers.

That the answer fits the rows of its step, tokens and logprobs both, is the core's own check. Raises INVALID_ARGUMENT, with what does
not fit, and changes nothing.
"""

import numpy as np
from trivet_proto.errors import TrivetError, invalid
from trivet_proto.v1 import types_pb2

from trivet_scheduler.plan import Flight, LogprobArrays, StepOutcome, StepStatus
from trivet_scheduler.replicas.wire import logprob_arrays


def verify(outcome: StepOutcome, flight: Flight, vocab_size: int) -> None:
    """An answer to `flight`, which names its rows."""
    if outcome.status is not StepStatus.DONE:
        return
    tokens = outcome.token_ids
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise _unfit(flight, f"a token id is not in the vocabulary of {vocab_size}")
    if outcome.logprobs is not None:
        _verify_arrays(flight, outcome.logprobs)
    for handle, first, logprobs in outcome.prompt_logprobs:
        _verify_prompt_logprobs(flight, handle, first, logprobs)


def _verify_prompt_logprobs(flight: Flight, handle: int, first: int, message: types_pb2.Logprobs) -> None:
    if handle not in flight.handles:
        raise _unfit(flight, f"prompt logprobs of handle {handle}, which was not in it")
    request = flight.requests[flight.handles.index(handle)]
    arrays = logprob_arrays(message)
    if first < 1 or first + len(arrays.counts) > request.num_prompt:
        raise _unfit(flight, f"prompt logprobs from position {first} on do not fit a prompt of {request.num_prompt} tokens")
    _verify_arrays(flight, arrays)


def _verify_arrays(flight: Flight, arrays: LogprobArrays) -> None:
    entries = len(arrays.token_ids)
    if len(arrays.ranks) != len(arrays.counts) or len(arrays.values) != entries:
        raise _unfit(flight, "the arrays of its logprobs differ in length")
    if (arrays.counts < 1).any() or int(arrays.counts.sum(dtype=np.int64)) != entries:
        raise _unfit(flight, f"the counts of its logprobs do not add up to {entries}")
    if not np.isfinite(arrays.values).all():
        raise _unfit(flight, "a logprob is not finite")


def _unfit(flight: Flight, what: str) -> TrivetError:
    return invalid(f"the result of step {flight.number} does not fit the step: {what}")
