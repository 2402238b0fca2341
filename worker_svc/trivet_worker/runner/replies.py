"""What a step's result says: sampled tokens, log probabilities, or why there are none.

Messages are filled here and nowhere read. Arrays are packed once a step.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_f32, pack_i32, pack_u8
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_worker.sampling.logprobs import TokenLogprobs
from trivet_worker.sampling.sampler import Sampled

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("not enough memory", "out of memory", "can't allocate memory")  # as torch says it


def put_sampled(result: worker_pb2.StepResult, num_rows: int, sampling: NDArray[np.int64], sampled: Sampled) -> None:
    """The tokens, flags and log probabilities of the rows `sampling` of a step of `num_rows`."""
    counts = np.zeros(num_rows, dtype=np.int32)
    good = sampled.flags == 0
    counts[sampling[good]] = 1
    result.token_counts = pack_i32(counts)
    result.token_ids = pack_i32(sampled.tokens[good])
    if sampled.flags.any():
        flags = np.zeros(num_rows, dtype=np.uint8)
        flags[sampling] = sampled.flags
        result.flags = pack_u8(flags)
    if sampled.logprobs is not None:
        kept = good[sampled.logprob_rows]
        result.logprob_rows = pack_i32(sampling[sampled.logprob_rows[kept]])
        result.logprobs.CopyFrom(logprobs_message(_keep(sampled.logprobs, kept)))


def _keep(logprobs: TokenLogprobs, kept: NDArray[np.bool_]) -> TokenLogprobs:
    if kept.all():
        return logprobs
    entries = np.repeat(kept, logprobs.counts)
    return TokenLogprobs(logprobs.counts[kept], logprobs.token_ids[entries], logprobs.values[entries], logprobs.ranks[kept])


def logprobs_message(logprobs: TokenLogprobs) -> types_pb2.Logprobs:
    return types_pb2.Logprobs(
        counts=pack_i32(logprobs.counts),
        token_ids=pack_i32(logprobs.token_ids),
        values=pack_f32(logprobs.values),
        ranks=pack_i32(logprobs.ranks),
    )


def put_failure(result: worker_pb2.StepResult, error: Exception) -> None:
    """Nothing of this iteration counts. Retryable for want of memory, since a smaller step may fit; else it would only fail again."""
    failed = worker_pb2.StepResult(
        epoch=result.epoch, step=result.step, iteration=result.iteration, last_iteration=True, status=worker_pb2.STEP_STATUS_FAILED
    )
    if _is_out_of_memory(error):
        logger.warning("step %d did not fit into memory: %s", result.step, error)
        known = TrivetError(ErrorKind.OUT_OF_MEMORY, "the step did not fit into memory")
    else:
        logger.error("step %d failed", result.step, exc_info=error)
        known = TrivetError(ErrorKind.INTERNAL, f"the step failed: {type(error).__name__}; the worker's log has the details")
    failed.error.CopyFrom(known.to_proto())
    result.CopyFrom(failed)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
