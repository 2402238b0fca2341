"""Decodes that go on: the rows of a step, kept for the next one that names the same requests and says nothing else.

Most steps are such. They are told by their bytes, checked with a few comparisons over all rows, and find their arrays here. Any other step,
a wrong one too, goes the long way (`step_check`, `inputs`). It owns the arrays of the inputs; the batch owns what they are filled from.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.api import PagedBatch
from trivet_proto.packing import I32, pack_i32, pack_u32
from trivet_proto.v1 import worker_pb2

from trivet_worker.runner.batch import PersistentBatch
from trivet_worker.runner.inputs import ModelInputs, Rows
from trivet_worker.runner.limits import MOST_ITERATIONS

# The fields of a step that brings nothing but another token for each of its requests.
PLAIN_STEP = frozenset({"epoch", "step", "known", "run_ahead", "forecast_us"})
PLAIN_ROWS = frozenset({"handles", "num_scheduled_tokens", "num_computed_tokens", "new_block_ids", "new_block_counts"})


class SteadyDecodes:
    """Of rows that each gave a token in the step before, from one token each."""

    def __init__(self, rows: Rows, batch: PersistentBatch) -> None:
        count = len(rows.slots)
        self.everyone = np.arange(count, dtype=np.int64)
        self._rows = rows
        self._batch = batch
        self._handles, self._ones = pack_u32(rows.handles), pack_i32(np.ones(count, dtype=np.int32))
        self._token_ids, self._positions, self._slot_mapping, self._seq_lens = np.empty((4, count), dtype=np.int64)
        self._starts = tuple(range(count + 1))

    @staticmethod
    def of(rows: Rows, batch: PersistentBatch) -> "SteadyDecodes | None":
        """None for rows that are no plain decodes."""
        slots = rows.slots
        are_plain = (rows.scheduled == 1) & batch.samples[slots] & (batch.prompt_logprobs[slots] < 0) & ~batch.is_broken[slots]
        reach_their_ends = rows.computed + 1 == batch.num_tokens[slots]
        return SteadyDecodes(rows, batch) if slots.size and bool((are_plain & reach_their_ends).all()) else None

    def take(self, step: worker_pb2.Step, num_blocks: int) -> Rows | None:
        """The rows of `step`, whose new blocks are then in the batch; None, and nothing changed, when it has to go the long way."""
        known, batch, slots = step.known, self._batch, self._rows.slots
        if known.handles != self._handles or known.num_scheduled_tokens != self._ones or not 0 <= step.run_ahead <= MOST_ITERATIONS:
            return None
        if not _names(step) <= PLAIN_STEP or not _names(known) <= PLAIN_ROWS or len(known.num_computed_tokens) != len(self._ones):
            return None
        computed = np.frombuffer(known.num_computed_tokens, dtype=I32).astype(np.int64)
        tokens, blocks = batch.num_tokens[slots], batch.num_blocks[slots]
        given = self._given(known, num_blocks)
        last = tokens + (max(1, step.run_ahead) - 1)
        if given is None or (computed + 1 != tokens).any() or batch.is_broken[slots].any() or int(last.max()) > batch.max_model_len:
            return None
        counts, ids = given
        if counts.size:
            blocks = blocks + counts
            if int(blocks.max()) > batch.most_blocks:
                return None
        if (last > blocks * batch.block_size).any():
            return None
        first = 0
        for row in np.flatnonzero(counts).tolist():
            batch.append_blocks(int(slots[row]), ids[first : first + counts[row]])
            first += int(counts[row])
        batch.left_out[slots] = 0
        return Rows(self._rows.handles, slots, computed, self._rows.scheduled)

    def _given(self, known: worker_pb2.KnownRequests, num_blocks: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """New blocks: a count for each row, or none at all, and their ids; None when they do not hold together."""
        nothing = np.zeros(0, dtype=np.int32)
        if not known.new_block_ids:
            return nothing, nothing
        if len(known.new_block_counts) != len(self._ones) or len(known.new_block_ids) % I32.itemsize:
            return None
        counts, ids = np.frombuffer(known.new_block_counts, dtype=I32), np.frombuffer(known.new_block_ids, dtype=I32)
        fits = int(counts.min()) >= 0 and int(counts.sum()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < num_blocks
        return (counts, ids) if fits else None

    def inputs(self, rows: Rows) -> ModelInputs:
        """Of its rows as far as they are now; the arrays are the same every time."""
        batch, slots, computed, block_size = self._batch, rows.slots, rows.computed, self._batch.block_size
        self._token_ids[:] = batch.token_ids[slots, computed]
        self._positions[:] = computed
        np.add(computed, 1, out=self._seq_lens)
        blocks, offsets = np.divmod(computed, block_size)
        np.multiply(batch.block_table[slots, blocks], block_size, out=self._slot_mapping)
        self._slot_mapping += offsets
        lengths = self._seq_lens.tolist()
        paged = PagedBatch(
            query_starts=self._starts,
            seq_lens=tuple(lengths),
            seq_lens_tensor=torch.from_numpy(self._seq_lens),
            block_table=torch.from_numpy(batch.block_table[slots, : -(-max(lengths) // block_size)]),
            slot_mapping=torch.from_numpy(self._slot_mapping),
            num_decodes=len(lengths),
        )
        return ModelInputs(
            token_ids=torch.from_numpy(self._token_ids),
            positions=torch.from_numpy(self._positions),
            batch=paged,
            starts=self.everyone,
            last_tokens=self.everyone,
        )


def _names(message: worker_pb2.Step | worker_pb2.KnownRequests) -> set[str]:
    return {field.name for field, _ in message.ListFields()}
