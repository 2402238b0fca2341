"""One scheduler, as a frontend sees it: a bidirectional stream that is kept alive, and the requests that ride on it.

Lifecycle: `run` dials, says hello, learns the model, passes deltas to the streams by handle, and when the stream ends fails what was on
it with a retryable error, waits a little and dials again, until it is cancelled. The session owns its handles, its outbox and the table
handle -> stream. It does not choose who gets a request (`routing.py`) and knows no text.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import grpc.aio
from trivet_chassis.clock import Clock
from trivet_chassis.rpc import create_channel, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.revision import agree
from trivet_proto.v1 import engine_pb2, types_pb2
from trivet_proto.v1.engine_pb2_grpc import EngineServiceStub

from trivet_frontend.engine import wire
from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.identity import Identity
from trivet_frontend.engine.request import AbortReason, EngineRequest
from trivet_frontend.engine.token_stream import TokenStream

logger = logging.getLogger(__name__)

# In quotes: generic for the type checker alone.
SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"

HEARTBEAT_SECONDS = 1.0
# Three heartbeats missed end the stream.
SILENCE_LIMIT_SECONDS = 3 * HEARTBEAT_SECONDS + 0.5
HELLO_TIMEOUT_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 2.0


class SessionLostError(Exception):
    """The stream ended; the words say how, for the log."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its session: what a hand-over would have to move."""

    session: "SchedulerSession"
    request: EngineRequest
    streams: tuple[TokenStream, ...]

    def stop(self, stream: TokenStream, count: int) -> None:
        """Tell the scheduler that the child ends with its first `count` tokens."""
        self.session.stop(stream, count)

    def abort(self, reason: AbortReason) -> None:
        """Give up every child that has not ended."""
        self.session.abort(self.streams, reason)


class SchedulerSession:
    """The session to one scheduler."""

    def __init__(
        self, address: str, *, identity: Identity, clock: Clock, slow_client_timeout: float, on_change: Callable[[], None]
    ) -> None:
        self.address = address
        self.model: ModelDescription | None = None
        self.load: LoadReport | None = None
        self.draining = False
        self.added_since_load = 0
        self._identity = identity
        self._clock = clock
        self._slow_client_timeout = slow_client_timeout
        self._on_change = on_change
        self._streams: dict[int, TokenStream] = {}
        self._next_handle = 1
        self._connected = False
        self._outbox: deque[engine_pb2.SessionRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._last_received = 0.0
        self._last_sent = 0.0

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return (
            self._connected
            and not self.draining
            and self.model is not None
            and self.load is not None
            and self.load.replicas_ready > 0
            and not self.load.paused
        )

    @property
    def live_streams(self) -> int:
        return len(self._streams)

    @property
    def queue_length(self) -> int:
        """Requests at the scheduler by its last report, and those sent since."""
        reported = 0 if self.load is None else self.load.requests_running + self.load.requests_waiting
        return reported + self.added_since_load

    # ---- requests ----

    def add(self, request: EngineRequest, *, age_ms: int) -> Submission:
        """Send `request` up; its streams are fed from now on."""
        if not self._connected:
            raise TrivetError(ErrorKind.UNAVAILABLE, f"the scheduler at {self.address} is not connected", retryable=True)
        streams = []
        for index in range(request.n):
            stream = TokenStream(handle=self._next_handle, index=index)
            self._next_handle += 1
            self._streams[stream.handle] = stream
            streams.append(stream)
        for message in wire.add_messages(request, [stream.handle for stream in streams], age_ms=age_ms):
            self._send(message)
        self.added_since_load += request.n
        return Submission(self, request, tuple(streams))

    def stop(self, stream: TokenStream, count: int) -> None:
        if self._streams.pop(stream.handle, None) is not None:
            self._send(wire.stop_message(stream.handle, count))

    def abort(self, streams: Sequence[TokenStream], reason: AbortReason) -> None:
        alive = [stream.handle for stream in streams if self._streams.pop(stream.handle, None) is not None]
        if alive:
            self._send(wire.abort_message(alive, reason))

    def announce_draining(self, deadline_ms: int) -> None:
        """Tell the scheduler that this frontend leaves; information only."""
        if self._connected:
            self._send(engine_pb2.SessionRequest(draining=types_pb2.Draining(deadline_ms=deadline_ms, reason="frontend is leaving")))

    def _send(self, message: engine_pb2.SessionRequest) -> None:
        if self._connected:
            self._outbox.append(message)
            self._outbox_filled.set()

    # ---- the stream ----

    async def run(self) -> None:
        """Keep the session up until cancelled."""
        backoff = FIRST_BACKOFF_SECONDS
        last_reason = ""
        while True:
            try:
                await self._converse()
                reason = "the scheduler closed the session"
            except SessionLostError as error:
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                reason = error_of(error).message
            except asyncio.InvalidStateError:
                reason = "the call ended"  # grpc.aio's way to say that a write came after the end
            except Exception:
                # A message that cannot be read ends this stream, never the frontend.
                logger.exception("the session to the scheduler at %s broke", self.address)
                reason = "a message could not be read"
            finally:
                was_connected = self._connected
                self._reset()
            if was_connected:
                backoff = FIRST_BACKOFF_SECONDS
            # While a scheduler is away the same line would come several times a second.
            if was_connected or reason != last_reason:
                logger.warning("no session to the scheduler at %s: %s", self.address, reason)
            last_reason = reason
            # Jitter keeps many frontends from dialling a scheduler that comes back all at the same moment.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _converse(self) -> None:
        async with create_channel(self.address) as channel:
            call = EngineServiceStub(channel).Session()
            try:
                await call.write(engine_pb2.SessionRequest(hello=self._identity.hello()))
                await self._receive_welcome(call)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call))
                    tasks.create_task(self._tick())
                    tasks.create_task(self._read(call))
            except ExceptionGroup as group:
                raise _first_leaf(group) from None
            finally:
                call.cancel()

    async def _receive_welcome(self, call: SessionCall) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                first = await call.read()
        except TimeoutError:
            raise SessionLostError("no welcome came") from None
        if not isinstance(first, engine_pb2.SessionResponse):  # the end of the stream
            raise SessionLostError(f"the scheduler refused the session: {await call.code()}: {await call.details()}")
        if first.WhichOneof("message") == "error":
            raise SessionLostError(f"the scheduler refused the session: {first.error.message}")
        if first.WhichOneof("message") != "welcome":
            raise SessionLostError("the first message was no welcome")
        disagreement = agree(first.welcome.scheduler.schema)
        if disagreement is not None:
            raise SessionLostError(disagreement)
        self._last_received = self._last_sent = self._clock.monotonic()
        self._connected = True
        logger.info("session to the scheduler %s at %s", first.welcome.scheduler.name or "without a name", self.address)
        self._on_change()

    async def _write(self, call: SessionCall) -> None:
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                await call.write(self._outbox.popleft())
                self._last_sent = self._clock.monotonic()
            self._outbox_filled.clear()

    async def _read(self, call: SessionCall) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, engine_pb2.SessionResponse):  # the end of the stream
                raise SessionLostError(f"the scheduler ended the session: {(await call.code()).name} {await call.details()}")
            self._last_received = self._clock.monotonic()
            kind = message.WhichOneof("message")
            if kind == "outputs":
                self._deliver(message.outputs)
            elif kind == "load":
                self._take_load(wire.load_of(message.load))
            elif kind == "model":
                self.model = wire.model_of(message.model.card)
                self._on_change()
            elif kind == "draining":
                self.draining = True
                self._on_change()
            elif kind == "error":
                raise SessionLostError(message.error.message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = self._clock.monotonic()
            if now - self._last_received > SILENCE_LIMIT_SECONDS:
                raise SessionLostError(f"nothing came for {now - self._last_received:.1f} s")
            if now - self._last_sent >= 0.9 * HEARTBEAT_SECONDS:
                self._send(engine_pb2.SessionRequest(heartbeat=types_pb2.Heartbeat()))
            self._cut_slow_readers(now)

    # ---- what comes down ----

    def _deliver(self, outputs: engine_pb2.StepOutputs) -> None:
        now = self._last_received
        # Errors first: the row of a failed child has a finish reason too, which must not end its stream as if all were well.
        for handle, error in wire.errors_of(outputs):
            stream = self._streams.pop(handle, None)
            if stream is not None:
                stream.fail(error)
        for handle, delta in wire.deltas_of(outputs):
            stream = self._streams.get(handle)
            if stream is None:
                continue  # stopped or aborted here: what still comes is overrun
            stream.push(delta, now=now)
            if delta.finish_reason is not None:
                del self._streams[handle]

    def _take_load(self, load: LoadReport) -> None:
        was_ready = self.ready
        self.load = load
        self.added_since_load = 0
        if self.ready != was_ready:
            self._on_change()

    def _cut_slow_readers(self, now: float) -> None:
        slow = [
            stream
            for stream in self._streams.values()
            if stream.pending_since is not None and now - stream.pending_since > self._slow_client_timeout
        ]
        if not slow:
            return
        self.abort(slow, AbortReason.SLOW_CLIENT)
        message = f"the client has not read its stream for {self._slow_client_timeout:g} s"
        for stream in slow:
            stream.fail(TrivetError(ErrorKind.CANCELLED, message))

    def _reset(self) -> None:
        self._connected = False
        self.model = None
        self.load = None
        self.draining = False
        self.added_since_load = 0
        self._outbox.clear()
        self._outbox_filled.clear()
        lost, self._streams = self._streams, {}
        for stream in lost.values():
            stream.fail(wire.lost_error())
        self._on_change()


def _first_leaf(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
