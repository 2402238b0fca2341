"""How the requests of the persistent batch are sampled: numbers in columns, the rare rest per row.

The columns are read with the step's rows as an index, so that plain requests need no Python of their own. What few requests have
(biases, masks, word lists, penalties) is kept per row and touched only where it is there. Ids beyond the
vocabulary are dropped: whoever admits requests refuses them, and here one of them must not take a whole step with it.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_proto.errors import TrivetError
from trivet_proto.packing import split_ragged, unpack_f32, unpack_i32
from trivet_proto.v1 import types_pb2

logger = logging.getLogger(__name__)

# Documented is 1e-5. Up to 1e-4 the outcome is the same but for exactly equal logits, common in bfloat16, which noise would decide.
GREEDY_UP_TO = 1e-4


@dataclass(slots=True)
class TokenCounts:
    """Which ids a request's prompt and output hold: what penalties look at."""

    in_prompt: torch.Tensor  # bool [V]
    in_output: torch.Tensor  # float32 [V], how often


@dataclass(slots=True)
class Extras:
    """What plain requests do not have. None where not asked for."""

    allowed: torch.Tensor | None = None  # bool [V]: masked where True
    bias_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    bad_words: list[NDArray[np.int32]] = field(default_factory=list)
    end_ids: torch.Tensor | None = None  # what min_tokens masks
    counts: TokenCounts | None = None

    @property
    def is_empty(self) -> bool:
        plain = self.allowed is None and self.bias_ids is None and self.end_ids is None and self.counts is None
        return plain and not self.bad_words


class SamplingColumns:
    """One row per slot of the persistent batch."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.seeds = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.presence = np.zeros(capacity, dtype=np.float32)
        self.frequency = np.zeros(capacity, dtype=np.float32)
        self.repetition = np.ones(capacity, dtype=np.float32)
        self.min_tokens = np.zeros(capacity, dtype=np.int32)
        self.logprobs = np.full(capacity, -1, dtype=np.int32)  # −1: none
        self.logprobs_mode = np.zeros(capacity, dtype=np.int32)
        self.extras: dict[int, Extras] = {}

    def put(self, slot: int, params: types_pb2.SamplingParams, seed: int, extras: Extras) -> None:
        """Take in a new request, whose `extras_of` were made before."""
        self.seeds[slot] = seed
        temperature = params.temperature if params.HasField("temperature") else 1.0
        self.temperature[slot] = 0.0 if temperature <= GREEDY_UP_TO else temperature
        self.top_p[slot] = params.top_p if params.HasField("top_p") else 1.0
        top_k = params.top_k if params.HasField("top_k") else 0
        self.top_k[slot] = 0 if top_k >= self._vocab_size else top_k
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = params.logprobs if params.HasField("logprobs") else -1
        self.logprobs_mode[slot] = params.logprobs_mode or types_pb2.LOGPROBS_MODE_RAW_LOGPROBS
        if extras.is_empty:
            self.extras.pop(slot, None)
        else:
            self.extras[slot] = extras

    def drop(self, slot: int) -> None:
        self.extras.pop(slot, None)

    def note_sampled(self, slot: int, token: int) -> None:
        extras = self.extras.get(slot)
        if extras is not None and extras.counts is not None:
            extras.counts.in_output[token] += 1

    def extras_of(self, params: types_pb2.SamplingParams, ids: NDArray[np.int32], num_prompt: int, eos: bytes) -> Extras:
        """What is rare about a request. `ids`, all within the vocabulary, are prompt and output so far.

        A request whose arrays do not hold together has every token masked: it ends, by its flag, and takes no other with it.
        """
        try:
            return self._read_extras(params, ids, num_prompt, eos)
        except (TrivetError, ValueError, IndexError) as error:
            logger.warning("sampling parameters that do not hold together: %s", error)
            return Extras(allowed=torch.ones(self._vocab_size, dtype=torch.bool))

    def _read_extras(self, params: types_pb2.SamplingParams, ids: NDArray[np.int32], num_prompt: int, eos: bytes) -> Extras:
        extras = Extras()
        if params.allowed_token_ids:
            extras.allowed = torch.ones(self._vocab_size, dtype=torch.bool)
            extras.allowed[self._index(unpack_i32(params.allowed_token_ids))] = False
        if params.logit_bias_ids:
            ids_of_bias, values = unpack_i32(params.logit_bias_ids), unpack_f32(params.logit_bias_values)
            known = self._is_known(ids_of_bias)
            extras.bias_ids, extras.bias_values = self._index(ids_of_bias), torch.from_numpy(values[known])
        if params.bad_words_counts:
            words = split_ragged(unpack_i32(params.bad_words_ids), unpack_i32(params.bad_words_counts), "bad_words")
            extras.bad_words = [word for word in words if len(word) and self._is_known(word).all()]
        if params.min_tokens:
            extras.end_ids = self._index(np.union1d(unpack_i32(eos), unpack_i32(params.stop_token_ids)))
        repeats = params.HasField("repetition_penalty") and params.repetition_penalty != 1.0
        if params.presence_penalty or params.frequency_penalty or repeats:
            prompt, output = torch.from_numpy(ids[:num_prompt].astype(np.int64)), torch.from_numpy(ids[num_prompt:].astype(np.int64))
            in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool)
            in_prompt[prompt] = True
            extras.counts = TokenCounts(in_prompt, torch.bincount(output, minlength=self._vocab_size).float())
        return extras

    def _is_known(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return (ids >= 0) & (ids < self._vocab_size)

    def _index(self, ids: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(ids[self._is_known(ids)].astype(np.int64))
