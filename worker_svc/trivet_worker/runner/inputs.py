"""A step's rows as arrays, and the model's inputs out of the persistent batch: numpy throughout, no loop over tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.api import PagedBatch

from trivet_worker.runner.batch import PersistentBatch, as_index


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a step, in the step's order: new ones, then known ones."""

    handles: NDArray[np.uint32]
    slots: NDArray[np.int64]
    computed: NDArray[np.int64]  # tokens whose keys are in the cache already
    scheduled: NDArray[np.int64]  # tokens to run

    @property
    def num_tokens(self) -> int:
        return int(self.scheduled.sum())


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Sorted so that decodes come first; `last_tokens[i]` is the last token of row i of the step."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    batch: PagedBatch
    starts: NDArray[np.int64]  # first token of each row of the step, in the sorted arrays
    last_tokens: NDArray[np.int64]


def build_inputs(rows: Rows, batch: PersistentBatch) -> ModelInputs:
    order = np.argsort(rows.scheduled > 1, kind="stable")
    slots, computed, scheduled = rows.slots[order], rows.computed[order], rows.scheduled[order]
    ends = np.cumsum(scheduled)
    starts = ends - scheduled
    per_token = np.repeat(slots, scheduled)
    positions = np.arange(int(ends[-1])) - np.repeat(starts - computed, scheduled)
    blocks = batch.block_table[per_token, positions // batch.block_size]
    seq_lens = computed + scheduled
    most_blocks = -(-int(seq_lens.max()) // batch.block_size)
    paged = PagedBatch(
        query_starts=(0, *ends.tolist()),
        seq_lens=tuple(seq_lens.tolist()),
        seq_lens_tensor=as_index(seq_lens),
        block_table=torch.from_numpy(np.ascontiguousarray(batch.block_table[slots, :most_blocks])),
        slot_mapping=as_index(blocks * batch.block_size + positions % batch.block_size),
        num_decodes=int((scheduled == 1).sum()),
    )
    by_row = np.empty_like(starts)
    by_row[order] = starts
    return ModelInputs(
        token_ids=as_index(batch.token_ids[per_token, positions].astype(np.int64)),
        positions=as_index(positions),
        batch=paged,
        starts=by_row,
        last_tokens=by_row + rows.scheduled - 1,
    )
