"""One `Attach` stream of the mock worker: hello, configure, bundle, ready; then steps in order, answers in order, heartbeats beside them.

It owns the runner, so that each epoch begins with an empty pool, and the queue of steps. How often it is tried again is its owner's
business. Everything runs on the event loop; the modelled time of a step is slept, so heartbeats go on meanwhile.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from trivet_chassis.rpc import create_channel, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import CHUNK_BYTES, MAX_STREAM_MESSAGE_BYTES
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc

from trivet_doubles.mock_worker.identity import Identity
from trivet_doubles.mock_worker.life import Life
from trivet_doubles.mock_worker.stepping import MockRunner, StepRows
from trivet_doubles.ticking import until_first_ends

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.5  # three heartbeats and some
PART_BYTES = MAX_STREAM_MESSAGE_BYTES // 2

Outgoing = worker_pb2.AttachRequest
AttachCall: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.AttachRequest, worker_pb2.AttachResponse]"


class DiedError(Exception):
    """The fault `die_step` came due."""


class Attachment:
    """From dialling to the end of the stream."""

    def __init__(self, identity: Identity, life: Life) -> None:
        self._identity = identity
        self._life = life
        self._clock = life.clock
        self._runner: MockRunner | None = None
        self._epoch: types_pb2.Epoch | None = None
        self._out: deque[Outgoing] = deque([Outgoing(hello=identity.hello())])
        self._filled = asyncio.Event()
        self._steps: asyncio.Queue[tuple[worker_pb2.Step, float]] = asyncio.Queue()
        self._parts: worker_pb2.Step | None = None
        self._heard_at = self._sent_at = self._free_at = life.clock.monotonic()
        self._last_received: int | None = None
        self._running: tuple[int, float] | None = None  # step, since
        self._is_silent = False

    async def live(self, address: str) -> None:
        """Until the stream ends. Raises the reason as a `TrivetError`, or `DiedError`."""
        async with create_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Attach(self._outgoing())
            try:
                await until_first_ends(
                    self._read(call, stub), self._run_steps(), self._tick(), names=("read the scheduler", "run steps", "heartbeats")
                )
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure) from failure
            finally:
                call.cancel()
                self._life.attached(None)

    def drain(self, deadline_ms: int) -> None:
        """Say that this worker leaves; steps that still come are answered."""
        self._send(Outgoing(draining=types_pb2.Draining(deadline_ms=deadline_ms, reason="the mock worker is shutting down")))

    # ---- the stream ----

    def _send(self, message: Outgoing) -> None:
        self._out.append(message)
        self._filled.set()

    async def _outgoing(self) -> AsyncIterator[Outgoing]:
        while True:
            while self._out:
                self._sent_at = self._clock.monotonic()
                yield self._out.popleft()
            self._filled.clear()
            await self._filled.wait()

    async def _tick(self) -> None:
        """Heartbeats when there was nothing else for a second; raises when the scheduler has been silent for too long."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            now = self._clock.monotonic()
            if now - self._heard_at > SILENCE_S:
                raise TrivetError(ErrorKind.UNAVAILABLE, f"no heartbeat of the scheduler for {SILENCE_S:g} s")
            if not self._is_silent and now - self._sent_at >= 0.9 * HEARTBEAT_S:
                self._send(Outgoing(heartbeat=self._heartbeat(now)))

    def _heartbeat(self, now: float) -> types_pb2.Heartbeat:
        beat = types_pb2.Heartbeat(activity=types_pb2.ACTIVITY_NONE)
        if self._last_received is not None:
            beat.last_step_received = self._last_received
        if self._running is not None:
            beat.running_step, beat.running_for_ms = self._running[0], int((now - self._running[1]) * 1000)
        return beat

    async def _read(self, call: AttachCall, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        async for message in call:
            self._heard_at = self._clock.monotonic()
            kind = message.WhichOneof("message")
            if kind == "step":
                self._take_step(message.step)
            elif kind == "configure":
                await self._configure(message.configure, stub)
            elif kind == "control":
                self._refuse_control(message.control)
            elif kind == "error":
                raise TrivetError.from_proto(message.error)
            elif kind == "drain":
                logger.info("the scheduler drains: %s", message.drain.reason)
        raise TrivetError(ErrorKind.UNAVAILABLE, "the scheduler ended the stream")

    async def _configure(self, configure: worker_pb2.Configure, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        config = configure.ranks[0]
        self._runner = self._identity.runner(config)
        if configure.bundle_wanted:
            await stub.PutBundle(self._bundle_chunks())
        self._epoch = configure.epoch
        self._send(Outgoing(ready=worker_pb2.Ready(epoch=configure.epoch, num_blocks=config.num_blocks)))
        logger.info("attached to %s with %d KV blocks", configure.scheduler.name, config.num_blocks - 1)
        self._life.attached(self._runner)

    async def _bundle_chunks(self) -> AsyncIterator[worker_pb2.PutBundleRequest]:
        data, digest = self._identity.bundle.to_bytes(), self._identity.bundle.digest
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = types_pb2.Chunk(data=data[offset : offset + CHUNK_BYTES], offset=offset, total=len(data))
            yield worker_pb2.PutBundleRequest(sha256=digest, chunk=chunk)

    def _refuse_control(self, control: worker_pb2.Control) -> None:
        action = control.WhichOneof("action") or "unknown"
        error = TrivetError(ErrorKind.UNIMPLEMENTED, f"the mock worker has no control {action}")
        self._send(Outgoing(reply=worker_pb2.Reply(call_id=control.call_id, error=error.to_proto())))

    # ---- steps ----

    def _take_step(self, step: worker_pb2.Step) -> None:
        whole = self._join(step)
        if whole is not None and whole.epoch == self._epoch:
            self._last_received = whole.step
            self._life.received()
            self._steps.put_nowait((whole, self._clock.monotonic()))

    def _join(self, step: worker_pb2.Step) -> worker_pb2.Step | None:
        """A step in parts, whole; None while parts are missing."""
        if not step.HasField("part"):
            return step
        if self._parts is None or self._parts.step != step.step:
            self._parts = worker_pb2.Step()
        self._parts.MergeFrom(step)
        if step.part.index + 1 < step.part.count:
            return None
        whole, self._parts = self._parts, None
        return whole

    async def _run_steps(self) -> None:
        while True:
            step, arrived = await self._steps.get()
            rows, iteration, is_last = None, 0, False
            while not is_last:
                started = self._clock.monotonic()
                self._running = (step.step, started)
                result, rows = await self._run(step, rows, iteration)
                is_last = result.last_iteration
                self._running = None
                timing = result.timing
                timing.receive_us = 0 if iteration else _microseconds(started - arrived)
                timing.total_us = timing.forward_us = _microseconds(self._clock.monotonic() - started)
                self._life.answered(result)
                for message in split_result(result):
                    self._send(Outgoing(result=message))
                iteration += 1
                if not is_last:
                    await asyncio.sleep(0)  # what has come meanwhile is to be seen

    async def _run(self, step: worker_pb2.Step, rows: StepRows | None, iteration: int) -> tuple[worker_pb2.StepResult, StepRows | None]:
        """One iteration, and the rows of the next, which are given back with its own."""
        runner, life = self._runner, self._life
        assert runner is not None, "steps come after the configuration"
        ordinal, faults = life.next_step(), life.faults
        result = worker_pb2.StepResult(epoch=step.epoch, step=step.step, iteration=iteration, last_iteration=True)
        written: StepRows | None = None
        try:
            if rows is None:
                rows = written = runner.update(step)
                if runner.skips(step):
                    result.status = worker_pb2.STEP_STATUS_SKIPPED
                    return result, None
                rows = written = runner.true_counts(rows)
            written = rows
            if faults.dies(ordinal):
                raise DiedError
            seconds = life.settings.modelled_seconds(len(rows.handles), rows.num_tokens)
            failure = faults.failure_of(ordinal, rows.num_tokens)
            if failure is None:
                written = None  # what cannot be run as it stands must not be scribbled over
                result = runner.run(step, rows, non_finite=ordinal in faults.non_finite_step)
                result.iteration = iteration
            await self._spend(seconds, stalls=faults.stalls(ordinal))
            if failure is None:
                left = max(1, step.run_ahead) - 1 - iteration
                result.last_iteration = runner.ends(rows, result, left, has_news=not self._steps.empty())
                return result, rows.following()
        except TrivetError as error:
            failure = error
        logger.warning("step %d fails: %s", step.step, failure.message)
        runner.fail(step, written)
        result = worker_pb2.StepResult(
            epoch=step.epoch, step=step.step, iteration=iteration, last_iteration=True, status=worker_pb2.STEP_STATUS_FAILED
        )
        result.error.CopyFrom(failure.to_proto())
        return result, None

    async def _spend(self, seconds: float, *, stalls: bool) -> None:
        """Let the modelled time pass. It is counted from when the step before was to end, so that waking up late does not add up."""
        self._free_at = max(self._free_at, self._running[1] if self._running else 0.0) + seconds
        if stalls:
            faults = self._life.faults
            logger.warning("stalling for %g s%s", faults.stall_for, ", silently" if faults.silent else "")
            self._is_silent = faults.silent
            self._free_at += faults.stall_for
        left = self._free_at - self._clock.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        self._is_silent = False


def split_result(result: worker_pb2.StepResult, most_bytes: int = PART_BYTES) -> list[worker_pb2.StepResult]:
    """Prompt logprobs can be megabytes: they go ahead in parts, everything else is in the last."""
    chunks = list(result.prompt_logprobs)
    groups: list[list[worker_pb2.PromptLogprobChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.ByteSize() > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.ByteSize()
    if len(groups) == 1:
        return [result]
    parts = [worker_pb2.StepResult(epoch=result.epoch, step=result.step, prompt_logprobs=group) for group in groups[:-1]]
    del result.prompt_logprobs[:]
    result.prompt_logprobs.extend(groups[-1])
    parts.append(result)
    for index, part in enumerate(parts):
        part.part.index, part.part.count = index, len(parts)
    return parts


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
