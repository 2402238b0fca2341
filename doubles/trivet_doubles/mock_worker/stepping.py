"""A step on the mock worker: update what is known of requests → write slots → read contexts → choose tokens → answer.

It owns the batch and the slots of one epoch, and knows whether it is behind a failed step. It takes no time: how long a step is to last,
and which one fails, is decided by its caller.
"""

import logging
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u8, pack_u32, split_ragged, unpack_i32, unpack_u32
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_doubles.logprobs import logprobs_message
from trivet_doubles.mock_worker.batch import MockBatch
from trivet_doubles.mock_worker.groups import groups_of
from trivet_doubles.mock_worker.kv_slots import KvSlots
from trivet_doubles.tokens import TokenLaw, next_tokens

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

SCRIBBLE = 0xBAD0BAD0BAD0BAD1
"""What a failed step leaves in the slots that it was to write: a device that fails may have written any part of them."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The requests of a step, in the step's order: new ones, then known ones. int64, one entry per request."""

    handles: NDArray[np.uint32]
    rows: Ints
    computed: Ints  # tokens whose slots are written already
    scheduled: Ints  # tokens to run

    @property
    def num_tokens(self) -> int:
        return int(self.scheduled.sum())

    @property
    def ends(self) -> Ints:
        return self.computed + self.scheduled

    def following(self) -> "StepRows":
        """The same decodes, a token further."""
        return replace(self, computed=self.computed + 1)


class MockRunner:
    """All state of one epoch: it is made anew by each `Configure`."""

    def __init__(self, config: types_pb2.KvCacheConfig, law: TokenLaw, *, max_num_seqs: int, max_model_len: int) -> None:
        groups = groups_of(config)
        self.batch = MockBatch(groups, capacity=max_num_seqs, max_model_len=max_model_len)
        self.wrong_slots = 0  # found so far
        self._slots = KvSlots(config.num_blocks, groups)
        self._law = law
        self._failed_step: int | None = None

    def update(self, step: worker_pb2.Step) -> StepRows:
        """Take in what the step says of requests; once for each step, whatever becomes of it. Raises ABORTED when it does not fit."""
        batch, known = self.batch, step.known
        for handle in unpack_u32(step.finished_handles, "finished_handles").tolist():
            batch.remove(handle)
        if step.blocks_to_zero:
            self._slots.zero(unpack_i32(step.blocks_to_zero, "blocks_to_zero").astype(np.int64))
        new = step.new_requests
        new_rows = [batch.add(request) for request in new]
        handles = unpack_u32(known.handles, "known.handles")
        rows = [batch.row(handle) for handle in handles.tolist()]
        self._append_blocks(known, rows)
        return StepRows(
            handles=np.concatenate([np.array([request.handle for request in new], dtype=np.uint32), handles]),
            rows=np.array(new_rows + rows, dtype=np.int64),
            computed=_joined([request.num_computed_tokens for request in new], known.num_computed_tokens),
            scheduled=_joined([request.num_scheduled_tokens for request in new], known.num_scheduled_tokens),
        )

    def true_counts(self, rows: StepRows) -> StepRows:
        """The rows of a step that is to run. One behind a step of several iterations is built as if all of them had run."""
        batch, at = self.batch, rows.rows
        beyond = rows.ends - batch.num_tokens[at]
        is_told_of = (beyond > 0) & (rows.scheduled == 1) & (beyond <= batch.left_out[at])
        batch.left_out[at] = 0
        return replace(rows, computed=np.where(is_told_of, rows.computed - beyond, rows.computed))

    def ends(self, rows: StepRows, result: worker_pb2.StepResult, left: int, *, has_news: bool) -> bool:
        """Whether this iteration is the step's last; `left` are those that it may still have. A row without a token can't go on."""
        if left and not has_news and bool(unpack_i32(result.token_counts, "token_counts").all()):
            return False
        self.batch.left_out[rows.rows] = left
        return True

    def skips(self, step: worker_pb2.Step) -> bool:
        """Whether it is held behind a failed step; one that says `resync` for it ends that."""
        if self._failed_step is not None and step.HasField("resync") and step.resync == self._failed_step:
            self._failed_step = None
        return self._failed_step is not None

    def fail(self, step: worker_pb2.Step, rows: StepRows | None) -> None:
        """The step fails: the slots that it was to write hold anything now, and what follows is skipped."""
        self._failed_step = step.step
        if rows is not None and rows.handles.size:
            per_token, positions = _flat(rows)
            self._slots.write(self.batch, per_token, positions, np.full(len(positions), SCRIBBLE, dtype=np.uint64))

    def run(self, step: worker_pb2.Step, rows: StepRows, *, non_finite: bool = False) -> worker_pb2.StepResult:
        """Raises ABORTED when the step cannot be run as it stands. With `non_finite` the first row has no token."""
        result = worker_pb2.StepResult(epoch=step.epoch, step=step.step, status=worker_pb2.STEP_STATUS_DONE, last_iteration=True)
        if step.copy_sources:
            self._slots.copy(unpack_i32(step.copy_sources).astype(np.int64), unpack_i32(step.copy_targets).astype(np.int64))
        counts = np.zeros(len(rows.handles), dtype=np.int32)
        result.handles = pack_u32(rows.handles)
        if rows.handles.size:
            self._check(rows)
            errors = self._forward(rows)
            sampling = self._sampling(rows)
            if non_finite:
                sampling = sampling[sampling != 0]
                result.flags = pack_u8([worker_pb2.ROW_FLAG_NON_FINITE, *[0] * (len(counts) - 1)])
            self._report_prompts(rows, result)
            tokens = self._choose(rows.rows[sampling], errors[sampling])
            counts[sampling] = 1
            result.token_ids = pack_i32(tokens)
            self._report_logprobs(rows, sampling, tokens, result)
            self.batch.append_tokens(rows.rows[sampling], tokens)
        result.token_counts = pack_i32(counts)
        result.stats.num_requests, result.stats.num_tokens = len(counts), rows.num_tokens
        return result

    # ---- parts of a step ----

    def _append_blocks(self, known: worker_pb2.KnownRequests, rows: list[int]) -> None:
        groups = len(self.batch.groups)
        counts = unpack_i32(known.new_block_counts, "known.new_block_counts")
        if len(counts) != len(rows) * groups:
            raise TrivetError(ErrorKind.ABORTED, f"{len(counts)} block counts came for {len(rows)} requests and {groups} groups")
        if not counts.any():
            return
        blocks = split_ragged(unpack_i32(known.new_block_ids, "known.new_block_ids"), counts, "known.new_block_ids")
        for index in np.flatnonzero(counts.reshape(len(rows), groups).any(axis=1)).tolist():
            self.batch.append_blocks(rows[index], blocks[index * groups : (index + 1) * groups])

    def _check(self, rows: StepRows) -> None:
        beyond = rows.ends > self.batch.num_tokens[rows.rows]
        if beyond.any():
            handle, end = int(rows.handles[beyond][0]), int(rows.ends[beyond][0])
            raise TrivetError(ErrorKind.ABORTED, f"request {handle} is to run up to token {end}, which does not exist yet")
        self._slots.check(self.batch, rows.rows, rows.ends)

    def _forward(self, rows: StepRows) -> NDArray[np.uint64]:
        """Write, then read everything that the rows look at. Returns each row's error, 0 where all is well."""
        per_token, positions = _flat(rows)
        self._slots.write(self.batch, per_token, positions)
        errors, wrong = self._slots.errors(self.batch, rows.rows, rows.computed, rows.ends)
        if wrong:
            self.wrong_slots += wrong
            handles = rows.handles[errors != 0].tolist()
            logger.warning("%d slots do not hold what requests %s need: their tokens will be wrong", wrong, handles)
            # What is computed from a wrong context is wrong itself.
            self._slots.write(self.batch, per_token, positions, np.repeat(errors, rows.scheduled))
        return errors

    def _sampling(self, rows: StepRows) -> Ints:
        """Indices of the rows that reach their last token in this step."""
        return np.flatnonzero((rows.ends == self.batch.num_tokens[rows.rows]) & self.batch.samples[rows.rows])

    def _choose(self, rows: Ints, errors: NDArray[np.uint64]) -> NDArray[np.int32]:
        batch = self.batch
        positions = batch.num_tokens[rows]
        last, seeds = batch.values[rows, positions - 1] + errors, batch.seeds[rows]
        tokens = next_tokens(last, seeds, positions, self._law.choices)
        if batch.choices:
            for index in [index for index, row in enumerate(rows.tolist()) if row in batch.choices]:
                one = slice(index, index + 1)
                tokens[one] = next_tokens(last[one], seeds[one], positions[one], batch.choices[int(rows[index])])
        return tokens

    def _report_logprobs(self, rows: StepRows, sampling: Ints, tokens: NDArray[np.int32], result: worker_pb2.StepResult) -> None:
        batch = self.batch
        wanted: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for index, token in zip(sampling.tolist() if batch.sampling else (), tokens.tolist(), strict=False):
            row = int(rows.rows[index])
            params = batch.sampling.get(row)
            if params is not None and params.HasField("logprobs"):
                wanted.append(index)
                entries.append((token, int(batch.num_tokens[row]), params.logprobs))
        if wanted:
            result.logprob_rows = pack_i32(wanted)
            result.logprobs.CopyFrom(logprobs_message(entries, self._law.choices))

    def _report_prompts(self, rows: StepRows, result: worker_pb2.StepResult) -> None:
        """Logprobs of prompt tokens whose predecessor ran in this step and that were not reported before."""
        batch = self.batch
        if not batch.prompt_logprobs_from:
            return
        for index, row in enumerate(rows.rows.tolist()):
            if row not in batch.prompt_logprobs_from:
                continue
            first = max(int(rows.computed[index]) + 1, batch.prompt_logprobs_from[row])
            last = min(int(rows.ends[index]), int(batch.num_prompt[row]) - 1)  # inclusive
            if first <= last:
                top = batch.sampling[row].prompt_logprobs
                tokens = [(int(batch.token_ids[row, position]), position, top) for position in range(first, last + 1)]
                message = logprobs_message(tokens, self._law.choices)
                result.prompt_logprobs.append(
                    worker_pb2.PromptLogprobChunk(handle=int(rows.handles[index]), first_position=first, logprobs=message)
                )


def _flat(rows: StepRows) -> tuple[Ints, Ints]:
    """Row and position of every token of the step."""
    starts = np.cumsum(rows.scheduled) - rows.scheduled
    per_token = np.repeat(rows.rows, rows.scheduled)
    return per_token, np.arange(rows.num_tokens) - np.repeat(starts - rows.computed, rows.scheduled)


def _joined(new: list[int], known: bytes) -> Ints:
    return np.concatenate([np.array(new, dtype=np.int64), unpack_i32(known).astype(np.int64)])
