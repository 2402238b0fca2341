"""What one request has new for its frontend, and many such rows as parallel arrays."""

from dataclasses import dataclass, field

import numpy as np
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.plan import LogprobArrays, cut_logprobs

ROW_BYTES = 64  # of a row's own numbers, generously
TOKEN_BYTES = 4
ENTRY_BYTES = 8  # a logprob's id and value


@dataclass(slots=True)
class Row:
    """Merges what comes while the stream is not writable."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobArrays] = field(default_factory=list)
    cached_tokens: int | None = None
    timing: tuple[int, int] | None = None
    finish: int = 0
    stop_token: int = -1
    error: types_pb2.Error | None = None

    @property
    def num_bytes(self) -> int:
        """About what it takes in a message."""
        error = 0 if self.error is None else self.error.ByteSize()
        return ROW_BYTES + error + TOKEN_BYTES * len(self.token_ids) + sum(map(_bytes_of, self.logprobs))

    def split_off(self, most_bytes: int) -> "Row":
        """Its first tokens, as many as go into `most_bytes`, at least one, as a row without the finish; the rest stays."""
        count = len(self.token_ids)
        if self.logprobs:
            arrays = _merged(self.logprobs)
            ends = np.cumsum(arrays.counts.astype(np.int64) * ENTRY_BYTES + 3 * TOKEN_BYTES)
            count = max(1, int(np.searchsorted(ends, most_bytes - ROW_BYTES, side="right")))
            head, rest = cut_logprobs(arrays, 0, count), cut_logprobs(arrays, count, len(arrays.counts))
            self.logprobs = [rest] if len(rest.counts) else []
        else:
            count = max(1, (most_bytes - ROW_BYTES) // TOKEN_BYTES)
            head = None
        first = Row(self.token_ids[:count], [] if head is None else [head], self.cached_tokens, self.timing)
        self.token_ids, self.cached_tokens, self.timing = self.token_ids[count:], None, None
        return first


def _bytes_of(arrays: LogprobArrays) -> int:
    return ENTRY_BYTES * len(arrays.token_ids) + 2 * TOKEN_BYTES * len(arrays.counts)


def _merged(parts: list[LogprobArrays]) -> LogprobArrays:
    return LogprobArrays(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def outputs_message(rows: dict[int, Row]) -> engine_pb2.StepOutputs:
    """Parallel arrays over the rows."""
    values = list(rows.values())
    message = engine_pb2.StepOutputs(
        handles=pack_u32(list(rows)),
        token_counts=pack_i32([len(row.token_ids) for row in values]),
        token_ids=pack_i32([token for row in values for token in row.token_ids]),
        finish_reasons=pack_u8([row.finish for row in values]),
    )
    if any(row.stop_token >= 0 for row in values):
        message.stop_token_ids = pack_i32([row.stop_token for row in values])
    cached = [(index, row.cached_tokens) for index, row in enumerate(values) if row.cached_tokens is not None]
    if cached:
        message.first_rows = pack_i32([index for index, _ in cached])
        message.cached_tokens = pack_i32([count for _, count in cached])
    timed = [(index, *row.timing) for index, row in enumerate(values) if row.timing is not None]
    if timed:
        rows_of, queued, prefill = zip(*timed, strict=True)
        message.timing.rows, message.timing.queued_us, message.timing.prefill_us = pack_i32(rows_of), pack_i32(queued), pack_i32(prefill)
    scored = [(index, row) for index, row in enumerate(values) if row.logprobs]
    if scored:
        arrays = _merged([part for _, row in scored for part in row.logprobs])
        message.logprob_rows = pack_i32([index for index, _ in scored])
        message.logprobs.counts, message.logprobs.token_ids = pack_i32(arrays.counts), pack_i32(arrays.token_ids)
        message.logprobs.values, message.logprobs.ranks = pack_f32(arrays.values), pack_i32(arrays.ranks)
    message.errors.extend(engine_pb2.RowError(handle=handle, error=row.error) for handle, row in rows.items() if row.error is not None)
    return message
