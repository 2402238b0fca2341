"""One stream to one scheduler, from hello to its end; an epoch lives as long as it.

The event loop owns the stream and the heartbeats, the step thread owns the runner. When a step can't be applied, scheduler and worker no
longer agree: the worker says `Lost`, and the next attachment begins with an empty pool. An answer of an older epoch is never sent.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from trivet_chassis.clock import Clock
from trivet_chassis.rpc import Dial, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import CHUNK_BYTES
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc

from trivet_worker.link.controls import perform
from trivet_worker.link.results import split_result
from trivet_worker.link.steps import StepSequence
from trivet_worker.loading import LoadedModel
from trivet_worker.step_thread import StepThread

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
TICK_S = HEARTBEAT_S / 4
SILENCE_S = 3.5  # three heartbeats and some
GOODBYE_S = 1.0  # for the scheduler to take in the last word and end the stream

Outgoing = worker_pb2.AttachRequest
Call: TypeAlias = "grpc.aio.StreamStreamCall[Outgoing, worker_pb2.AttachResponse]"
Stub: TypeAlias = "worker_pb2_grpc.WorkerServiceAsyncStub"


@dataclass(frozen=True, slots=True)
class Running:
    """The step that computes, and since when on the monotonic clock."""

    step: int
    since: float


class Attachment:
    """`on_change` is called when it is ready and when it no longer is; `observe` with each result that is sent."""

    def __init__(
        self,
        address: str,
        hello: worker_pb2.WorkerHello,
        model: LoadedModel,
        thread: StepThread,
        clock: Clock,
        *,
        dial: Dial,
        on_change: Callable[[], None],
        observe: Callable[[worker_pb2.StepResult], None],
    ) -> None:
        self.address = address
        self._model = model
        self._thread = thread
        self._clock = clock
        self._dial = dial
        self._on_change = on_change
        self._observe = observe
        self._out: asyncio.Queue[Outgoing | None] = asyncio.Queue()
        self._out.put_nowait(Outgoing(hello=hello))
        self._ended: asyncio.Future[TrivetError] = asyncio.get_running_loop().create_future()
        self._heard_at = self._said_at = clock.monotonic()
        self._is_configuring = False
        self._activity = types_pb2.ACTIVITY_NONE
        self._epoch: types_pb2.Epoch | None = None
        self._steps = StepSequence()
        self._has_control = False  # one waits for its turn; set by the event loop, read by the step thread
        self._done_at = -math.inf  # when the last step was; the step thread's own
        self._runs_no_more = False  # set by either thread, read by the step thread
        self.running: Running | None = None
        self.is_ready = False
        self.was_ready = False
        self.home_drains = False

    async def run(self) -> TrivetError | None:
        """Until the stream ends. Returns the reason where there was one: raised, it would keep the stream and its socket in a traceback."""
        async with self._dial(self.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Attach(self._outgoing())
            reading = asyncio.create_task(self._read(call, stub), name="read the scheduler's stream")
            watching = asyncio.create_task(self._until_silent(), name="watch the scheduler")
            try:
                ends: set[asyncio.Future[Any]] = {reading, watching, self._ended}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not reading.done():
                    self._end(TrivetError(ErrorKind.UNAVAILABLE, f"no heartbeat for {SILENCE_S:g} s"))
                elif self._ended.done():
                    await asyncio.wait({reading}, timeout=GOODBYE_S)
            finally:
                call.cancel()
                self._out.put_nowait(None)
                reading.cancel()
                watching.cancel()
                await asyncio.gather(reading, watching, return_exceptions=True)
                await self._forget()
        if self._ended.done():
            return self._ended.result()
        return reading.result()

    def say_draining(self, deadline_s: float, reason: str) -> None:
        """No new requests, please; what runs here may finish until the deadline, `deadline_s` seconds from now."""
        self._send(Outgoing(draining=types_pb2.Draining(deadline_ms=int(deadline_s * 1000), reason=reason)))

    # ---- the stream ----

    async def _outgoing(self) -> AsyncIterator[Outgoing]:
        """The stream up. No timeout of its own: each would cost a task, with every answer."""
        while (message := await self._out.get()) is not None:
            yield message

    async def _read(self, call: Call, stub: Stub) -> TrivetError | None:
        """Until the other side ends the stream; returns what gRPC says of its end."""
        try:
            async for message in call:
                self._heard_at = self._clock.monotonic()
                if not self._ended.done():  # else it is of an epoch that is over
                    await self._take_or_lose(message, stub)
        except grpc.aio.AioRpcError as failure:
            return error_of(failure)
        return None

    async def _take_or_lose(self, message: worker_pb2.AttachResponse, stub: Stub) -> None:
        try:
            await self._take(message, stub)
        except TrivetError as error:
            self._lose(error)
        except MemoryError:
            self._lose(TrivetError(ErrorKind.OUT_OF_MEMORY, "the KV cache does not fit into memory; set kv_cache_memory"))

    async def _until_silent(self) -> None:
        """Give a sign of life where there was nothing to say for a second, as long as the other side gives any."""
        # While the cache is being allocated nobody reads the stream.
        while self._is_configuring or self._clock.monotonic() - self._heard_at <= SILENCE_S:
            if self._clock.monotonic() - self._said_at > HEARTBEAT_S - TICK_S:
                self._send(Outgoing(heartbeat=self._heartbeat()))
            await asyncio.sleep(TICK_S)

    async def _take(self, message: worker_pb2.AttachResponse, stub: Stub) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            self._take_step(message.step)
        elif kind == "configure":
            await self._configure(message.configure, stub)
        elif kind == "control":
            self._take_control(message.control)
        elif kind == "error":
            self._end(TrivetError.from_proto(message.error))
        elif kind == "drain":
            self.home_drains = True
            logger.info("the scheduler drains: %s", message.drain.reason)

    async def _configure(self, configure: worker_pb2.Configure, stub: Stub) -> None:
        if self._epoch is not None or len(configure.ranks) != 1:
            raise TrivetError(ErrorKind.ABORTED, f"a second configuration, or one for {len(configure.ranks)} ranks instead of 1")
        config = configure.ranks[0]
        self._is_configuring = True
        try:
            await self._thread.call(lambda: self._model.runner.configure(config))
            if configure.bundle_wanted:
                await stub.PutBundle(self._bundle_chunks())
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        finally:
            self._is_configuring = False
            self._heard_at = self._clock.monotonic()
        self._epoch = configure.epoch
        self.is_ready = self.was_ready = True
        self._send(Outgoing(ready=worker_pb2.Ready(epoch=configure.epoch, num_blocks=config.num_blocks)))
        logger.info("attached to %s with %d KV blocks", configure.scheduler.name, config.num_blocks - 1)
        self._on_change()

    async def _bundle_chunks(self) -> AsyncIterator[worker_pb2.PutBundleRequest]:
        data, digest = self._model.bundle.to_bytes(), self._model.bundle.digest
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = types_pb2.Chunk(data=data[offset : offset + CHUNK_BYTES], offset=offset, total=len(data))
            yield worker_pb2.PutBundleRequest(sha256=digest, chunk=chunk)

    def _take_control(self, control: worker_pb2.Control) -> None:
        """Done in turn with the steps, on their thread; heartbeats go on and say with what it is busy."""

        def work() -> TrivetError | None:
            return None if self._runs_no_more else perform(control, self._model.runner)

        def answer(error: TrivetError | None) -> None:
            self._has_control = False
            self._activity = types_pb2.ACTIVITY_SLEEP if self._model.runner.is_asleep else types_pb2.ACTIVITY_NONE
            if not self._ended.done():
                self._send(Outgoing(reply=worker_pb2.Reply(call_id=control.call_id, error=None if error is None else error.to_proto())))

        self._activity = types_pb2.ACTIVITY_LOAD
        self._has_control = True
        self._thread.submit(work, answer)

    # ---- steps ----

    def _take_step(self, step: worker_pb2.Step) -> None:
        if self._epoch is None or step.epoch != self._epoch:
            return  # of another life
        whole = self._steps.take(step)
        if whole is None:
            return
        arrived = self._clock.monotonic()

        def has_news() -> bool:
            return self._runs_no_more or self._has_control or self._steps.last != whole.step

        def work() -> Iterator[worker_pb2.StepResult | Exception]:
            runner, result, could_start = self._model.runner, None, max(arrived, self._done_at)
            while not self._runs_no_more and (result is None or not result.last_iteration):
                started = self._clock.monotonic()
                self.running = Running(whole.step, started)
                try:
                    result = runner.execute(whole, has_news) if result is None else runner.go_on(has_news)
                except Exception as error:
                    self._runs_no_more = True
                    yield error
                    return
                finally:
                    self.running = None
                if not result.iteration:
                    result.timing.receive_us = int((started - arrived) * 1e6)
                result.timing.link_us = int((started - could_start) * 1e6)
                self._done_at = could_start = self._clock.monotonic()
                yield result

        self._thread.submit_series(work, self._answer)

    def _answer(self, outcome: worker_pb2.StepResult | Exception) -> None:
        if self._ended.done():
            return
        if isinstance(outcome, TrivetError):
            self._lose(outcome)
        elif isinstance(outcome, Exception):
            logger.error("a step could not be applied", exc_info=outcome)
            self._lose(TrivetError(ErrorKind.ABORTED, f"a step could not be applied: {type(outcome).__name__}"))
        else:
            self._observe(outcome)
            for message in split_result(outcome):
                self._send(Outgoing(result=message))

    # ---- its end ----

    def _lose(self, error: TrivetError) -> None:
        """We can't go on: say why and close our half of the stream."""
        if not self._ended.done():
            self._send(Outgoing(lost=worker_pb2.Lost(reason=error.message)))
            self._out.put_nowait(None)
        self._end(error)

    def _end(self, error: TrivetError) -> None:
        if not self._ended.done():
            self._runs_no_more = True
            self._ended.set_result(error.with_traceback(None))

    async def _forget(self) -> None:
        """Finish or discard what is held: steps of this epoch are skipped once it is over."""
        self._runs_no_more = True
        if self.is_ready:
            self.is_ready = False
            self._on_change()
        await self._thread.call(lambda: None)

    def _send(self, message: Outgoing) -> None:
        self._said_at = self._clock.monotonic()
        self._out.put_nowait(message)

    def _heartbeat(self) -> types_pb2.Heartbeat:
        beat = types_pb2.Heartbeat(activity=types_pb2.ACTIVITY_LOAD if self._is_configuring else self._activity)
        if self._steps.last is not None:
            beat.last_step_received = self._steps.last
        running = self.running
        if running is not None:
            beat.running_step, beat.running_for_ms = running.step, int((self._clock.monotonic() - running.since) * 1000)
        return beat
