"""What is to be sent to one frontend: at most one message of outputs, however slow its reader.

While the stream is not writable new results merge into the waiting row of their handle, so a slow frontend costs one row per request.
Control messages keep their order and go first.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from trivet_proto.errors import TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.plan import Delta, LogprobArrays
from trivet_scheduler.request import FINISH_REASONS

MOST_PROMPT_BYTES = MAX_STREAM_MESSAGE_BYTES // 2


@dataclass(slots=True)
class Row:
    """What one request has new for its frontend."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobArrays] = field(default_factory=list)
    cached_tokens: int | None = None
    timing: tuple[int, int] | None = None
    finish: int = 0
    stop_token: int = -1
    error: types_pb2.Error | None = None


class Outbox:
    """Filled by the engine, emptied by the session's stream."""

    def __init__(self) -> None:
        self._control: deque[engine_pb2.SessionResponse] = deque()
        self._rows: dict[int, Row] = {}
        self._prompt_logprobs: deque[engine_pb2.PromptLogprobs] = deque()
        self._load: engine_pb2.Load | None = None
        self._wake = asyncio.Event()

    def put_control(self, message: engine_pb2.SessionResponse) -> None:
        self._control.append(message)
        self._wake.set()

    def put_load(self, load: engine_pb2.Load) -> None:
        """The newest report replaces one that is still unsent."""
        self._load = load
        self._wake.set()

    def put_delta(self, delta: Delta) -> None:
        request = delta.request
        row = self._rows.setdefault(request.handle, Row())
        row.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            row.logprobs.append(delta.logprobs)
        for first, logprobs in delta.prompt_logprobs:
            self._prompt_logprobs.append(engine_pb2.PromptLogprobs(handle=request.handle, first_position=first, logprobs=logprobs))
        if delta.cached_tokens is not None:
            row.cached_tokens = delta.cached_tokens
        row.timing = delta.timing or row.timing
        if delta.finish is not None:
            row.finish = FINISH_REASONS[delta.finish]
            row.stop_token = -1 if request.stop_token is None else request.stop_token
            row.error = None if request.error is None else request.error.to_proto()
        self._wake.set()

    def put_error(self, handle: int, error: TrivetError) -> None:
        """A request that was refused: its one and only row."""
        self._rows[handle] = Row(finish=types_pb2.FINISH_REASON_ERROR, error=error.to_proto())
        self._wake.set()

    def forget(self, handle: int) -> None:
        """Nothing more is said of a handle."""
        self._rows.pop(handle, None)

    async def next(self) -> engine_pb2.SessionResponse:
        """The next message; waits for one."""
        while True:
            message = self._take()
            if message is not None:
                return message
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> engine_pb2.SessionResponse | None:
        if self._control:
            return self._control.popleft()
        if self._prompt_logprobs:
            return engine_pb2.SessionResponse(outputs=self._prompt_outputs())
        if self._rows:
            rows, self._rows = self._rows, {}
            return engine_pb2.SessionResponse(outputs=outputs_message(rows))
        if self._load is not None:
            load, self._load = self._load, None
            return engine_pb2.SessionResponse(load=load)
        return None

    def _prompt_outputs(self) -> engine_pb2.StepOutputs:
        """As many chunks as go into one message, ahead of the rows that finish their requests."""
        chunks: list[engine_pb2.PromptLogprobs] = []
        size = 0
        while self._prompt_logprobs and (not chunks or size + self._prompt_logprobs[0].ByteSize() <= MOST_PROMPT_BYTES):
            size += self._prompt_logprobs[0].ByteSize()
            chunks.append(self._prompt_logprobs.popleft())
        return engine_pb2.StepOutputs(prompt_logprobs=chunks)


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
        arrays = [part for _, row in scored for part in row.logprobs]
        message.logprob_rows = pack_i32([index for index, _ in scored])
        message.logprobs.counts = pack_i32(np.concatenate([part.counts for part in arrays]))
        message.logprobs.token_ids = pack_i32(np.concatenate([part.token_ids for part in arrays]))
        message.logprobs.values = pack_f32(np.concatenate([part.values for part in arrays]))
        message.logprobs.ranks = pack_i32(np.concatenate([part.ranks for part in arrays]))
    message.errors.extend(engine_pb2.RowError(handle=handle, error=row.error) for handle, row in rows.items() if row.error is not None)
    return message
