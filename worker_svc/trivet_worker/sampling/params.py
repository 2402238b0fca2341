"""How the requests of the persistent batch are sampled: numbers in columns, the rare rest packed, one array a request.

The columns are read with the step's rows as an index, and the packed arrays by their addresses, so that no request needs Python of its own
in a step. Ids beyond the vocabulary are dropped: whoever admits requests refuses them, and here one of them must not take a whole step
with it.
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trivet_kernels.cpu.sampling import SamplingColumnArrays
from trivet_proto.errors import TrivetError
from trivet_proto.packing import split_ragged, unpack_f32, unpack_i32
from trivet_proto.v1 import types_pb2

logger = logging.getLogger(__name__)

# Documented is 1e-5. Up to 1e-4 the outcome is the same but for exactly equal logits, common in bfloat16, which noise would decide.
GREEDY_UP_TO = 1e-4
NO_IDS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Constraints:
    """What changes single tokens' logits. Ids are int32, all within the vocabulary."""

    allowed: NDArray[np.int32] | None  # None: all
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    words: tuple[NDArray[np.int32], ...]  # the last id is masked after the others
    end_ids: NDArray[np.int32]  # masked until min_tokens

    def packed(self) -> NDArray[np.int32] | None:
        """One array, as native/sampling_kernels.h reads it; None where there is nothing."""
        if self.allowed is None and not (len(self.bias_ids) or self.words or len(self.end_ids)):
            return None
        sizes = [len(word) for word in self.words]
        allowed = NO_IDS if self.allowed is None else self.allowed
        head = [-1 if self.allowed is None else len(allowed), len(self.bias_ids), len(sizes), sum(sizes), len(self.end_ids)]
        parts = (head, allowed, self.bias_ids, self.bias_values.view(np.int32), sizes, *self.words, self.end_ids)
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


@dataclass(frozen=True, slots=True)
class Extras:
    """What plain requests do not have."""

    constraints: Constraints
    logprob_ids: NDArray[np.int32]  # logprobs of these instead of the most likely

    @staticmethod
    def nothing_allowed() -> "Extras":
        return Extras(Constraints(NO_IDS, NO_IDS, np.zeros(0, dtype=np.float32), (), NO_IDS), NO_IDS)


class SamplingColumns:
    """One row per slot of the persistent batch."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.arrays = SamplingColumnArrays(
            seeds=np.zeros(capacity, dtype=np.uint64),
            temperature=np.zeros(capacity, dtype=np.float32),
            top_p=np.ones(capacity, dtype=np.float32),
            top_k=np.zeros(capacity, dtype=np.int64),
            min_p=np.zeros(capacity, dtype=np.float32),
            presence=np.zeros(capacity, dtype=np.float32),
            frequency=np.zeros(capacity, dtype=np.float32),
            repetition=np.ones(capacity, dtype=np.float32),
            min_tokens=np.zeros(capacity, dtype=np.int32),
            constraints=np.zeros(capacity, dtype=np.uint64),
        )
        self.logprobs = np.full(capacity, -1, dtype=np.int32)  # −1: none
        self.logprobs_mode = np.zeros(capacity, dtype=np.int32)
        self.has_logprob_ids = np.zeros(capacity, dtype=np.bool_)
        self.logprob_ids: dict[int, NDArray[np.int32]] = {}
        self.constraints: dict[int, Constraints] = {}
        self._packed: dict[int, NDArray[np.int32]] = {}  # what the addresses are of

    def put(self, slot: int, params: types_pb2.SamplingParams, seed: int, extras: Extras) -> None:
        """Take in a new request, whose `extras_of` were made before."""
        arrays = self.arrays
        arrays.seeds[slot] = seed
        temperature = params.temperature if params.HasField("temperature") else 1.0
        arrays.temperature[slot] = 0.0 if temperature <= GREEDY_UP_TO else temperature
        arrays.top_p[slot] = params.top_p if params.HasField("top_p") else 1.0
        top_k = params.top_k if params.HasField("top_k") else 0
        arrays.top_k[slot] = 0 if top_k >= self._vocab_size else top_k
        arrays.min_p[slot] = params.min_p
        arrays.presence[slot] = params.presence_penalty
        arrays.frequency[slot] = params.frequency_penalty
        arrays.repetition[slot] = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        arrays.min_tokens[slot] = params.min_tokens
        self.drop(slot)
        self.logprobs[slot] = self._width(params, extras)
        self.logprobs_mode[slot] = params.logprobs_mode or types_pb2.LOGPROBS_MODE_RAW_LOGPROBS
        self.has_logprob_ids[slot] = extras.logprob_ids.size > 0
        if extras.logprob_ids.size:
            self.logprob_ids[slot] = extras.logprob_ids
        packed = extras.constraints.packed()
        if packed is not None:
            self.constraints[slot], self._packed[slot] = extras.constraints, packed
            arrays.constraints[slot] = packed.ctypes.data

    def drop(self, slot: int) -> None:
        self.arrays.constraints[slot] = 0
        self.constraints.pop(slot, None)
        self._packed.pop(slot, None)
        self.logprob_ids.pop(slot, None)

    def _width(self, params: types_pb2.SamplingParams, extras: Extras) -> int:
        """How many entries beside the sampled token's own."""
        if extras.logprob_ids.size:
            return int(extras.logprob_ids.size)
        if params.all_logprobs:
            return self._vocab_size
        return min(params.logprobs, self._vocab_size) if params.HasField("logprobs") else -1

    def extras_of(self, params: types_pb2.SamplingParams, eos: bytes) -> Extras:
        """What is rare about a request.

        A request whose arrays do not hold together has every token masked: it ends, by its flag, and takes no other with it.
        """
        try:
            return self._read_extras(params, eos)
        except (TrivetError, ValueError, IndexError) as error:
            logger.warning("sampling parameters that do not hold together: %s", error)
            return Extras.nothing_allowed()

    def _read_extras(self, params: types_pb2.SamplingParams, eos: bytes) -> Extras:
        bias_ids, values = unpack_i32(params.logit_bias_ids), unpack_f32(params.logit_bias_values)
        if len(bias_ids) != len(values):
            raise ValueError(f"{len(bias_ids)} biased ids have {len(values)} biases")
        last = {id_: index for index, id_ in enumerate(bias_ids.tolist()) if 0 <= id_ < self._vocab_size}  # named twice: the last counts
        words: list[NDArray[np.int32]] = []
        if params.bad_words_counts:
            words = list(split_ragged(unpack_i32(params.bad_words_ids), unpack_i32(params.bad_words_counts), "bad_words"))
        ends = np.union1d(unpack_i32(eos), unpack_i32(params.stop_token_ids)) if params.min_tokens else NO_IDS
        kept = np.array(list(last.values()), dtype=np.int64)
        constraints = Constraints(
            allowed=self._known(unpack_i32(params.allowed_token_ids)) if params.allowed_token_ids else None,
            bias_ids=bias_ids[kept],
            bias_values=values[kept],
            words=tuple(word for word in words if len(word) and self._is_known(word).all()),
            end_ids=self._known(ends),
        )
        return Extras(constraints, self._known(unpack_i32(params.logprob_token_ids)))

    def _is_known(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return (ids >= 0) & (ids < self._vocab_size)

    def _known(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return ids[self._is_known(ids)]
