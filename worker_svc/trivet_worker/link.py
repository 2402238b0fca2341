"""The worker's end of `Attach`: dial, say what this replica is, allocate what the scheduler configures, run its steps.

When the stream ends it dials again. The event loop owns the stream and the heartbeats, the step thread owns the runner. Before it dials
again the worker has finished or discarded every step it held; an answer of an older epoch is never sent.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable

import grpc
from trivet_chassis.clock import Clock
from trivet_chassis.metrics import software_version
from trivet_chassis.rpc import create_channel, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import CHUNK_BYTES
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc

from trivet_worker.config import WorkerSettings
from trivet_worker.loading import LoadedModel
from trivet_worker.step_thread import StepThread

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.5  # three heartbeats and some
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
STEPS_IN_FLIGHT = 2

Outgoing = worker_pb2.AttachRequest


class SchedulerLink:
    """Keeps one attachment alive for as long as the process lives."""

    def __init__(self, settings: WorkerSettings, model: LoadedModel, thread: StepThread, clock: Clock) -> None:
        self._settings = settings
        self._model = model
        self._thread = thread
        self._clock = clock
        self._instance = os.urandom(16)
        self._out: asyncio.Queue[Outgoing | None] = asyncio.Queue()
        self._epoch: types_pb2.Epoch | None = None
        self._parts: worker_pb2.Step | None = None
        self._heard_at = 0.0
        self._is_configuring = False
        self._last_received: int | None = None
        self._running: tuple[int, float] | None = None  # step, since
        self._was_attached = False  # in the attempt at hand
        self._is_leaving = False
        self.is_attached = False
        self.on_change: Callable[[], None] = lambda: None
        self.observe: Callable[[worker_pb2.StepResult], None] = lambda result: None

    async def run(self) -> None:
        """Attach, again and again, until draining. Raises FAILED_PRECONDITION when this worker cannot serve there."""
        backoff = FIRST_BACKOFF_S
        while not self._is_leaving:
            try:
                await self._attach()
                backoff = FIRST_BACKOFF_S
            except TrivetError as error:
                if error.kind is ErrorKind.FAILED_PRECONDITION:
                    raise
                if self._was_attached:
                    backoff = FIRST_BACKOFF_S
                if backoff == FIRST_BACKOFF_S and not self._is_leaving:
                    logger.warning("the scheduler at %s: %s; dialling again", self._settings.scheduler, error.message)
            if not self._is_leaving:
                await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    def say_draining(self) -> None:
        """The scheduler moves what runs here elsewhere; this link does not dial again."""
        self._is_leaving = True
        self._out.put_nowait(Outgoing(draining=types_pb2.Draining(reason="the worker is shutting down")))

    # ---- one attachment ----

    async def _attach(self) -> None:
        async with create_channel(self._settings.scheduler) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            self._out = asyncio.Queue()
            self._out.put_nowait(Outgoing(hello=self._hello()))
            self._heard_at = self._clock.monotonic()
            call = stub.Attach(self._outgoing())
            watch = asyncio.create_task(self._watch(call), name="watch the scheduler")
            try:
                async for message in call:
                    self._heard_at = self._clock.monotonic()
                    await self._take(message, stub)
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure) from failure
            except asyncio.CancelledError:
                if not watch.done():
                    raise  # we are being stopped; else the watch ended the call
                raise TrivetError(ErrorKind.UNAVAILABLE, f"no heartbeat for {SILENCE_S:g} s") from None
            finally:
                watch.cancel()
                call.cancel()
                self._out.put_nowait(None)
                await self._forget()

    async def _forget(self) -> None:
        """Finish or discard what is held: steps of this epoch are skipped once it is over."""
        self._was_attached, self.is_attached = self.is_attached, False
        self._epoch, self._parts, self._running = None, None, None
        if self._was_attached:
            self.on_change()
        await self._thread.call(lambda: None)

    async def _outgoing(self) -> AsyncIterator[Outgoing]:
        """The stream up; a heartbeat when there was nothing else for a second."""
        out = self._out
        while True:
            try:
                message = out.get_nowait() if not out.empty() else await asyncio.wait_for(out.get(), HEARTBEAT_S)
            except TimeoutError:
                message = Outgoing(heartbeat=self._heartbeat())
            if message is None:
                return
            yield message

    async def _watch(self, call: "grpc.aio.StreamStreamCall[Outgoing, worker_pb2.AttachResponse]") -> None:
        # While the cache is being allocated nobody reads the stream.
        while self._is_configuring or self._clock.monotonic() - self._heard_at <= SILENCE_S:
            await asyncio.sleep(HEARTBEAT_S / 2)
        call.cancel()

    async def _take(self, message: worker_pb2.AttachResponse, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
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

    async def _configure(self, configure: worker_pb2.Configure, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        config = configure.ranks[0]
        self._is_configuring = True
        try:
            await self._thread.call(lambda: self._model.runner.configure(config))
            if configure.bundle_wanted:
                await stub.PutBundle(self._bundle_chunks())
        finally:
            self._is_configuring = False
            self._heard_at = self._clock.monotonic()
        self._epoch = configure.epoch
        self.is_attached = True
        self._out.put_nowait(Outgoing(ready=worker_pb2.Ready(epoch=configure.epoch, num_blocks=config.num_blocks)))
        logger.info("attached to %s with %d KV blocks", configure.scheduler.name, config.num_blocks - 1)
        self.on_change()

    async def _bundle_chunks(self) -> AsyncIterator[worker_pb2.PutBundleRequest]:
        data, digest = self._model.bundle.to_bytes(), self._model.bundle.digest
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = types_pb2.Chunk(data=data[offset : offset + CHUNK_BYTES], offset=offset, total=len(data))
            yield worker_pb2.PutBundleRequest(sha256=digest, chunk=chunk)

    def _refuse_control(self, control: worker_pb2.Control) -> None:
        action = control.WhichOneof("action") or "unknown"
        error = TrivetError(ErrorKind.UNIMPLEMENTED, f"this worker has no control {action}")
        self._out.put_nowait(Outgoing(reply=worker_pb2.Reply(call_id=control.call_id, error=error.to_proto())))

    # ---- steps ----

    def _take_step(self, step: worker_pb2.Step) -> None:
        whole = self._join(step)
        if whole is None or whole.epoch != self._epoch:
            return
        self._last_received = whole.step
        epoch, arrived = self._epoch, self._clock.monotonic()

        def work() -> worker_pb2.StepResult | None:
            if self._epoch is not epoch:
                return None  # the stream it came on is gone
            started = self._clock.monotonic()
            self._running = (whole.step, started)
            result = self._model.runner.execute(whole)
            result.timing.receive_us = int((started - arrived) * 1e6)
            self._running = None
            return result

        self._thread.submit(work, self._answer)

    def _answer(self, result: worker_pb2.StepResult | None) -> None:
        if result is None or result.epoch != self._epoch:
            return
        self.observe(result)
        for message in split_result(result):
            self._out.put_nowait(Outgoing(result=message))

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

    # ---- what it says of itself ----

    def _hello(self) -> worker_pb2.WorkerHello:
        settings, model = self._settings, self._model
        rank = worker_pb2.RankResources(
            rank=0, layers=model.layers, kv_bytes_available=model.kv_bytes, device="cpu", attention_backend=model.backend.name
        )
        if settings.num_kv_blocks is not None:
            rank.num_kv_blocks = settings.num_kv_blocks
        limits = model.limits
        return worker_pb2.WorkerHello(
            hello=types_pb2.Hello(name=settings.replica_name, instance=self._instance, schema=SCHEMA, version=software_version()),
            role=types_pb2.REPLICA_ROLE_BOTH,
            parallel=worker_pb2.ParallelSizes(tensor=1, pipeline=1, data=1, prefill_context=1, decode_context=1),
            card=model.card,
            ranks=[rank],
            limits=worker_pb2.WorkerLimits(
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
            ),
            abilities=worker_pb2.WorkerAbilities(steps_in_flight=STEPS_IN_FLIGHT, run_ahead=1, zeroes_blocks=True),
        )

    def _heartbeat(self) -> types_pb2.Heartbeat:
        beat = types_pb2.Heartbeat(activity=types_pb2.ACTIVITY_LOAD if self._is_configuring else types_pb2.ACTIVITY_NONE)
        if self._last_received is not None:
            beat.last_step_received = self._last_received
        running = self._running
        if running is not None:
            beat.running_step, beat.running_for_ms = running[0], int((self._clock.monotonic() - running[1]) * 1000)
        return beat


def split_result(result: worker_pb2.StepResult, most_bytes: int = 512 * 1024) -> list[worker_pb2.StepResult]:
    """Prompt logprobs can be megabytes: they go ahead in parts, everything else is in the last."""
    chunks = list(result.prompt_logprobs)
    if sum(chunk.ByteSize() for chunk in chunks) <= most_bytes:
        return [result]
    groups: list[list[worker_pb2.PromptLogprobChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.ByteSize() > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.ByteSize()
    parts = [worker_pb2.StepResult(epoch=result.epoch, step=result.step, prompt_logprobs=group) for group in groups[:-1]]
    last = worker_pb2.StepResult()
    last.CopyFrom(result)
    del last.prompt_logprobs[:]
    last.prompt_logprobs.extend(groups[-1])
    parts.append(last)
    for index, part in enumerate(parts):
        part.part.index, part.part.count = index, len(parts)
    return parts
