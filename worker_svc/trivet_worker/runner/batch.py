"""The persistent batch: what the worker knows of each request between steps, in columns by slot.

It owns token ids (prompt, output so far, and what it samples itself), block tables and counters. A slot is taken when a request comes
in full and given back when the scheduler says it is finished.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_proto.v1 import worker_pb2

from trivet_worker.sampling.params import Extras, SamplingColumns
from trivet_worker.sampling.processors import ActiveProcessors


@dataclass(frozen=True, slots=True)
class NewWork:
    """A request that comes in full, read and checked."""

    message: worker_pb2.NewRequest
    token_ids: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    extras: Extras
    stop_ids: frozenset[int]


class PersistentBatch:
    """Room for `capacity` requests of at most `max_model_len` tokens. One column more than that takes the last sampled token."""

    def __init__(self, *, capacity: int, max_model_len: int, block_size: int, vocab_size: int, processors: ActiveProcessors) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.most_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((capacity, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((capacity, self.most_blocks), dtype=np.int32)  # padded with the null block
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        self.num_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_prompt = np.zeros(capacity, dtype=np.int64)
        self.is_broken = np.zeros(capacity, dtype=np.bool_)  # no token could be sampled; its end is on the way
        # Iterations that the last step of a request was given and did not run. The step behind it may have left before that was known.
        self.left_out = np.zeros(capacity, dtype=np.int64)
        self.samples = np.zeros(capacity, dtype=np.bool_)  # False: the prompt runs for its logprobs alone
        self.prompt_logprobs = np.full(capacity, -1, dtype=np.int64)  # top n; −1: none
        self.prompt_logprobs_from = np.zeros(capacity, dtype=np.int64)
        self.sampling = SamplingColumns(capacity, vocab_size)
        self.stop_ids: dict[int, frozenset[int]] = {}  # by slot: what ends a request, as far as a worker knows
        self._processors = processors
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def clear(self) -> None:
        """Forget everything: a new epoch begins."""
        for handle in list(self._slots):
            self.remove(handle)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def slot_of(self, handle: int) -> int | None:
        """None for a handle that is not held."""
        return self._slots.get(handle)

    def remove(self, handle: int) -> None:
        """A handle that is not held is ignored."""
        slot = self._slots.pop(handle, None)
        if slot is not None:
            self.sampling.drop(slot)
            self._processors.remove(slot)
            self.block_table[slot, : self.num_blocks[slot]] = 0
            self._free.append(slot)

    def add(self, work: NewWork) -> int:
        """Take a request in full; whoever checked it found room."""
        request, ids = work.message, work.token_ids
        slot = self._free.pop()
        self._slots[request.handle] = slot
        self.token_ids[slot, : len(ids)] = ids
        self.num_tokens[slot] = len(ids)
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_blocks[slot] = 0
        self.append_blocks(slot, work.block_ids)
        self.is_broken[slot] = False
        self.left_out[slot] = 0
        self.stop_ids[slot] = work.stop_ids
        sampling = request.sampling
        self.samples[slot] = not (sampling.HasField("max_tokens") and sampling.max_tokens == 0)
        self.prompt_logprobs[slot] = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else -1
        self.prompt_logprobs_from[slot] = max(1, request.prompt_logprobs_reported)
        self.sampling.put(slot, sampling, request.seed, work.extras)
        self._processors.add(slot, request, ids)
        return slot

    def append_blocks(self, slot: int, blocks: NDArray[np.int32]) -> None:
        first = int(self.num_blocks[slot])
        self.block_table[slot, first : first + len(blocks)] = blocks
        self.num_blocks[slot] = first + len(blocks)


def as_index(values: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
