"""What the mock worker knows of each request between steps, in columns by row: ids, the values that its slots must hold, block tables.

A row is taken when a request comes in full and given back when the scheduler says that it is finished.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import split_ragged, unpack_i32
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_doubles.mock_worker.groups import Group
from trivet_doubles.narrowing import narrowed_choices
from trivet_doubles.tokens import Choices, slot_hashes, slot_values


class MockBatch:
    """Room for `capacity` requests of at most `max_model_len` tokens. Not touched pages of the columns cost no memory."""

    def __init__(self, groups: tuple[Group, ...], *, capacity: int, max_model_len: int) -> None:
        self.groups = groups
        self._max_model_len = max_model_len
        # One column more takes the last sampled token; the values are read in whole blocks.
        width = max_model_len + 1 + max(group.block_size for group in groups)
        self.token_ids = np.zeros((capacity, width), dtype=np.int32)
        self.values = np.zeros((capacity, width), dtype=np.uint64)
        self.num_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_prompt = np.zeros(capacity, dtype=np.int64)
        self.seeds = np.zeros(capacity, dtype=np.uint64)
        # Iterations that the last step of a request was given and did not run. The step behind it may have left before that was known.
        self.left_out = np.zeros(capacity, dtype=np.int64)
        self.samples = np.zeros(capacity, dtype=np.bool_)  # False: the prompt runs for its logprobs alone
        self.tables = [np.zeros((capacity, width // group.block_size + 1), dtype=np.int64) for group in groups]
        self.num_blocks = np.zeros((len(groups), capacity), dtype=np.int64)
        self.sampling: dict[int, types_pb2.SamplingParams] = {}  # rows that want logprobs
        self.choices: dict[int, Choices] = {}  # rows whose request narrows the ids
        self.prompt_logprobs_from: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, handle: int) -> int:
        """Raises ABORTED for a handle that is not known: the scheduler and the worker no longer agree."""
        row = self._rows.get(handle)
        if row is None:
            raise TrivetError(ErrorKind.ABORTED, f"the step names request {handle}, which this worker does not hold")
        return row

    def remove(self, handle: int) -> None:
        """A handle that is not held is ignored."""
        row = self._rows.pop(handle, None)
        if row is None:
            return
        for group, table in zip(self.groups, self.tables, strict=True):
            table[row, : self.num_blocks[group.index, row]] = 0
        self.sampling.pop(row, None)
        self.choices.pop(row, None)
        self.prompt_logprobs_from.pop(row, None)
        self._free.append(row)

    def add(self, request: worker_pb2.NewRequest) -> int:
        """Take a request in full. Raises ABORTED when it does not fit what was announced."""
        ids = unpack_i32(request.token_ids, "token_ids")
        if request.handle in self._rows or not self._free or len(ids) > self._max_model_len:
            raise TrivetError(
                ErrorKind.ABORTED, f"request {request.handle} of {len(ids)} tokens is known already or over this worker's limits"
            )
        row = self._free.pop()
        self._rows[request.handle] = row
        self.token_ids[row, : len(ids)] = ids
        self.values[row, : len(ids)] = slot_values(ids)
        self.num_tokens[row], self.num_prompt[row] = len(ids), request.num_prompt_tokens
        self.seeds[row] = request.seed
        self.num_blocks[:, row] = self.left_out[row] = 0
        counts = unpack_i32(request.block_counts, "block_counts")
        self.append_blocks(row, split_ragged(unpack_i32(request.block_ids, "block_ids"), counts, "block_ids"))
        self._take_sampling(row, request.sampling, request.prompt_logprobs_reported)
        return row

    def append_blocks(self, row: int, blocks_by_group: Sequence[NDArray[np.int32]]) -> None:
        """One array of block ids for each group."""
        if len(blocks_by_group) != len(self.groups):
            raise TrivetError(ErrorKind.ABORTED, f"blocks for {len(blocks_by_group)} groups came, {len(self.groups)} are configured")
        for group, table, blocks in zip(self.groups, self.tables, blocks_by_group, strict=True):
            first = int(self.num_blocks[group.index, row])
            if first + len(blocks) > table.shape[1]:
                raise TrivetError(ErrorKind.ABORTED, f"a request was given {first + len(blocks)} blocks, more than the context takes")
            table[row, first : first + len(blocks)] = blocks
            self.num_blocks[group.index, row] = first + len(blocks)

    def append_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """What was sampled; the next step finds it here without having been told."""
        at = self.num_tokens[rows]
        self.token_ids[rows, at] = tokens
        self.values[rows, at] = self.values[rows, at - 1] + slot_hashes(tokens, at)
        self.num_tokens[rows] = at + 1

    def _take_sampling(self, row: int, sampling: types_pb2.SamplingParams, reported: int) -> None:
        self.samples[row] = not (sampling.HasField("max_tokens") and sampling.max_tokens == 0)
        if sampling.HasField("logprobs"):
            self.sampling[row] = sampling
        if sampling.HasField("prompt_logprobs"):
            self.sampling[row] = sampling
            self.prompt_logprobs_from[row] = max(1, reported)
        choices = narrowed_choices(sampling)
        if choices is not None:
            self.choices[row] = choices
