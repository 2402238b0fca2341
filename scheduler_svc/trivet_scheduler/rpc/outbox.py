"""What is to be sent to one frontend: at most one message of outputs, however slow its reader.

While the stream is not writable new results merge into the waiting row of their handle, so a slow frontend costs one row per request.
Control messages keep their order and go first. No message exceeds what a stream takes: rows that would not fit wait for the next one, and
a row too long by itself goes in pieces, the last of which carries its finish.
"""

import asyncio
from collections import deque

from trivet_proto.errors import TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.plan import Delta
from trivet_scheduler.request import FINISH_REASONS
from trivet_scheduler.rpc.rows import Row, outputs_message

MOST_BYTES = MAX_STREAM_MESSAGE_BYTES // 2


class Outbox:
    """Filled by the engine, emptied by the session's stream."""

    def __init__(self) -> None:
        self._control: deque[engine_pb2.SessionResponse] = deque()
        self._rows: dict[int, Row] = {}
        self._prompt_logprobs: deque[engine_pb2.PromptLogprobs] = deque()
        self._load: engine_pb2.Load | None = None
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()

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
        self._prompt_logprobs = deque(chunk for chunk in self._prompt_logprobs if chunk.handle != handle)

    async def next(self) -> engine_pb2.SessionResponse:
        """The next message; waits for one."""
        while True:
            message = self._take()
            if message is not None:
                return message
            self._emptied.set()
            self._wake.clear()
            await self._wake.wait()

    async def until_empty(self) -> None:
        """Return when all that was put here is written."""
        self._emptied.clear()
        self._wake.set()
        await self._emptied.wait()

    def _take(self) -> engine_pb2.SessionResponse | None:
        if self._control:
            return self._control.popleft()
        if self._prompt_logprobs:
            return engine_pb2.SessionResponse(outputs=self._prompt_outputs())
        if self._rows:
            return engine_pb2.SessionResponse(outputs=outputs_message(self._take_rows()))
        if self._load is not None:
            load, self._load = self._load, None
            return engine_pb2.SessionResponse(load=load)
        return None

    def _take_rows(self) -> dict[int, Row]:
        """As many rows as go into one message."""
        taken: dict[int, Row] = {}
        left = MOST_BYTES
        while self._rows:
            handle, row = next(iter(self._rows.items()))
            size = row.num_bytes
            if size <= left:
                taken[handle] = self._rows.pop(handle)
                left -= size
                continue
            if not taken:
                taken[handle] = row.split_off(left)
            break
        return taken

    def _prompt_outputs(self) -> engine_pb2.StepOutputs:
        """As many chunks as go into one message, ahead of the rows that finish their requests."""
        chunks: list[engine_pb2.PromptLogprobs] = []
        size = 0
        while self._prompt_logprobs and (not chunks or size + self._prompt_logprobs[0].ByteSize() <= MOST_BYTES):
            size += self._prompt_logprobs[0].ByteSize()
            chunks.append(self._prompt_logprobs.popleft())
        return engine_pb2.StepOutputs(prompt_logprobs=chunks)
