"""The simulated KV pool: a 64-bit value in every slot of every block, written and read through block tables as a model would.

It owns the pool of one epoch, which begins empty. Reading compares what is found with what the requests' ids call for: a block that was
freed too early, given twice, named wrongly or never written shows here.
"""

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_doubles.mock_worker.batch import MockBatch
from trivet_doubles.mock_worker.groups import Group
from trivet_doubles.tokens import Values, mix

Ints = NDArray[np.int64]


class KvSlots:
    """uint64 [num_blocks, block_size], shared by all groups; what a group writes bears its salt."""

    def __init__(self, num_blocks: int, groups: tuple[Group, ...]) -> None:
        self._groups = tuple(group for group in groups if group.has_token_slots)
        self._values = np.zeros((num_blocks, max(group.block_size for group in groups)), dtype=np.uint64)

    def zero(self, blocks: Ints) -> None:
        self._values[blocks] = 0

    def copy(self, sources: Ints, targets: Ints) -> None:
        self._values[targets] = self._values[sources]

    def check(self, batch: MockBatch, rows: Ints, ends: Ints) -> None:
        """Raises ABORTED when a row's block tables are shorter than its tokens or name blocks that are not in the pool."""
        for group in self._groups:
            table = batch.tables[group.index]
            short = batch.num_blocks[group.index, rows] * group.block_size < ends
            if short.any():
                row = int(rows[short][0])
                raise TrivetError(
                    ErrorKind.ABORTED,
                    f"a request of {int(ends[short][0])} tokens has {int(batch.num_blocks[group.index, row])} blocks of {group.block_size}",
                )
            most = -(-int(ends.max()) // group.block_size)
            named = table[rows, :most]
            if named.min() < 0 or named.max() >= len(self._values):
                raise TrivetError(ErrorKind.ABORTED, f"the step names blocks that are not in the pool of {len(self._values)}")

    def write(self, batch: MockBatch, rows: Ints, positions: Ints, added: Values | None = None) -> None:
        """What a forward leaves behind for a token at each position of each row; `added` (uint64 per token) spoils it."""
        values = batch.values[rows, positions]
        if added is not None:
            values = values + added
        for group in self._groups:
            blocks = batch.tables[group.index][rows, positions // group.block_size]
            self._values[blocks, positions % group.block_size] = values ^ group.salt

    def errors(self, batch: MockBatch, rows: Ints, computed: Ints, ends: Ints) -> tuple[Values, int]:
        """Per row 0 when all slots of its context hold what they must, else a hash of what was found; and how many slots do not."""
        errors = np.zeros(len(rows), dtype=np.uint64)
        wrong = 0
        for group in self._groups:
            firsts = group.first_read(computed)
            # Rows of like length together, so that one long context does not make the others' arrays long.
            sizes = np.frexp(-(-ends // group.block_size))[1]
            for size in np.unique(sizes):
                picked = np.flatnonzero(sizes == size)
                found, bad = self._read(group, batch, rows[picked], firsts[picked], ends[picked])
                if bad.any():
                    wrong += int(bad.sum())
                    errors[picked] += np.where(bad, mix(found) | np.uint64(1), np.uint64(0)).sum(axis=1, dtype=np.uint64)
                    # An even number of them can add up to nothing.
                    errors[picked[bad.any(axis=1)]] |= np.uint64(1)
        return errors, wrong

    def _read(self, group: Group, batch: MockBatch, rows: Ints, firsts: Ints, ends: Ints) -> tuple[Values, NDArray[np.bool_]]:
        """[rows, longest]: the values found, and where they are not what they must be."""
        blocks = -(-int(ends.max()) // group.block_size)
        begin = int(firsts.min()) // group.block_size
        table = batch.tables[group.index][rows, begin:blocks]
        # `take` of whole blocks is several times as fast as indexing; a step of 256 long contexts reads megabytes.
        found = self._values.take(table.reshape(-1), axis=0)[:, : group.block_size].reshape(len(rows), -1)
        positions = np.arange(begin * group.block_size, blocks * group.block_size)
        wanted = batch.values[rows, positions[0] : positions[-1] + 1]
        bad = found != (wanted ^ group.salt if group.index else wanted)
        ragged = (int(ends.min()) // group.block_size - begin) * group.block_size  # before this column every row has all tokens
        bad[:, ragged:] &= positions[ragged:] < ends[:, None]
        if firsts.any():
            bad &= positions >= firsts[:, None]
        return found, bad
