"""One scheduler, as a frontend sees it: what it says of itself, and the requests that ride on the stream to it.

Lifecycle: `run` dials (`conversation.py`), learns the model, passes deltas to the streams by handle, and when the stream ends gives back
what rode on it, waits a little and dials again, until it is cancelled or no longer listed. The session owns its handles and the table
handle -> stream. It does not choose who gets a request (`routing.py`), does not decide what becomes of a request that it lost
(`handover.py`) and knows no text.

A scheduler that breaks the contract (arrays that contradict each other, a row for a handle that is not running) loses this stream and
nothing else.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from trivet_chassis.clock import Clock
from trivet_chassis.rpc import Dial, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_frontend.engine import wire
from trivet_frontend.engine.conversation import Conversation, SessionLostError
from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.identity import Identity
from trivet_frontend.engine.request import AbortReason, FinishReason, TokenDelta
from trivet_frontend.engine.submission import Submission
from trivet_frontend.engine.token_stream import TokenStream

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 2.0


class Owner(Protocol):
    """Who keeps the sessions, and is told what they cannot decide."""

    def note_change(self) -> None:
        """The session came, went, drains, or learned of a model or of readiness."""

    def take_back(self, submission: Submission, session: "SchedulerSession", error: TrivetError) -> None:
        """The scheduler gave the request back, or is gone; it rides nowhere now."""

    def until_wanted(self, session: "SchedulerSession") -> Awaitable[None]:
        """Return when the session should be dialled."""


@dataclass(frozen=True, slots=True)
class Rider:
    """A child under its handle."""

    submission: Submission
    stream: TokenStream


class SchedulerSession:
    """The session to one scheduler."""

    def __init__(self, address: str, *, dial: Dial, identity: Identity, clock: Clock, slow_client_timeout: float, owner: Owner) -> None:
        self.address = address
        self.is_listed = True
        self.name = ""
        self.instance = b""
        self.model: ModelDescription | None = None
        self.load: LoadReport | None = None
        self.load_at = 0.0
        self.draining = False
        self.added_since_load = 0
        self._dial = dial
        self._identity = identity
        self._clock = clock
        self._slow_client_timeout = slow_client_timeout
        self._owner = owner
        self._riders: dict[int, Rider] = {}
        # Stopped or aborted here: their one finish still comes.
        self._leaving: set[int] = set()
        self._next_handle = 1
        # The stream that was dialled last, and the same once it is welcome and until it ends.
        self._dialled: Conversation | None = None
        self._conversation: Conversation | None = None

    @property
    def connected(self) -> bool:
        return self._conversation is not None

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return (
            self._conversation is not None
            and not self.draining
            and self.model is not None
            and self.load is not None
            and self.load.replicas_ready > 0
            and not self.load.paused
        )

    @property
    def live_streams(self) -> int:
        return len(self._riders)

    @property
    def handles(self) -> int:
        """Handles of which something may still come."""
        return len(self._riders) + len(self._leaving)

    @property
    def queue_length(self) -> int:
        """Requests at the scheduler by its last report, and those sent since."""
        reported = 0 if self.load is None else self.load.requests_running + self.load.requests_waiting
        return reported + self.added_since_load

    @property
    def submissions(self) -> list[Submission]:
        """The requests that ride here, in the order in which they came."""
        return list(dict.fromkeys(rider.submission for rider in self._riders.values()))

    # ---- requests ----

    def carry(self, submission: Submission) -> None:
        """Send a request up, or take it up where it was left; its streams are fed from now on.

        Raises UNAVAILABLE without a stream, TOO_LARGE for a request that does not fit the messages.
        """
        if self._conversation is None:
            raise TrivetError(ErrorKind.UNAVAILABLE, "the scheduler is not connected", retryable=True)
        request = submission.request
        passed_ms = int(1000 * (self._clock.monotonic() - submission.submitted_at))
        handles = range(self._next_handle, self._next_handle + request.n)
        messages = wire.add_messages(
            submission,
            handles,
            age_ms=request.age_ms + passed_ms,
            timeout_ms=None if request.timeout_ms is None else max(1, request.timeout_ms - passed_ms),
        )
        self._next_handle = handles.stop
        for handle, stream in zip(handles, submission.streams, strict=True):
            stream.handle = handle
            if stream.ended:
                self._leaving.add(handle)
            else:
                self._riders[handle] = Rider(submission, stream)
        for message in messages:
            self._conversation.send(message)
        self.added_since_load += request.n
        submission.carrier = self

    def stop(self, stream: TokenStream, count: int) -> None:
        if self._leave(stream):
            self._send(wire.stop_message(stream.handle, count))

    def abort(self, streams: tuple[TokenStream, ...], reason: AbortReason) -> None:
        alive = [stream.handle for stream in streams if self._leave(stream)]
        if alive:
            self._send(wire.abort_message(alive, reason))

    def release(self, submission: Submission) -> None:
        """Let a request go to another scheduler."""
        self.abort(submission.streams, AbortReason.MOVED)
        submission.carrier = None

    def announce_draining(self, deadline_ms: int) -> None:
        """Tell the scheduler that this frontend leaves; information only."""
        self._send(engine_pb2.SessionRequest(draining=types_pb2.Draining(deadline_ms=deadline_ms, reason="frontend is leaving")))

    def _leave(self, stream: TokenStream) -> bool:
        """Let go of a child that rides here; what still comes for it is overrun, until its finish."""
        if self._riders.pop(stream.handle, None) is None:
            return False
        self._leaving.add(stream.handle)
        return True

    def _send(self, message: engine_pb2.SessionRequest) -> None:
        if self._conversation is not None:
            self._conversation.send(message)

    # ---- the stream ----

    async def run(self) -> None:
        """Keep the session up until cancelled, or until it ends when no longer listed.

        Raises ALREADY_EXISTS when another process has taken this frontend's name: dialling again would take it back, and so on for ever.
        """
        backoff = FIRST_BACKOFF_SECONDS
        last_reason = ""
        while self.is_listed:
            await self._owner.until_wanted(self)
            try:
                reason = await self._hold()
            finally:
                was_connected = self.connected
                lost = self._reset()
            if was_connected:
                backoff = FIRST_BACKOFF_SECONDS
            # While a scheduler is away the same line would come several times a second.
            if was_connected or reason != last_reason:
                logger.warning("no session to the scheduler at %s, %d requests were on it: %s", self.address, lost, reason)
            last_reason = reason
            # Jitter keeps many frontends from dialling a scheduler that comes back all at the same moment.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _hold(self) -> str:
        """Dial once and converse; returns how that ended. Raises ALREADY_EXISTS when another process has taken the name."""
        conversation = self._dialled = Conversation(self.address, dial=self._dial, clock=self._clock)
        try:
            await conversation.hold(self._identity.hello(), self)
        except SessionLostError as lost:
            return str(lost)
        except (TrivetError, grpc.aio.AioRpcError) as failure:
            reason = failure if isinstance(failure, TrivetError) else error_of(failure)
            if reason.kind is ErrorKind.ALREADY_EXISTS:
                raise reason from None
            return reason.message
        except asyncio.InvalidStateError:
            return "the call ended"  # grpc.aio's way to say that a write came after the end
        except Exception:
            # A message that cannot be read ends this stream, never the frontend.
            logger.exception("the session to the scheduler at %s broke", self.address)
            return "a message could not be read"
        return "the scheduler closed the session"

    def welcome(self, welcome: engine_pb2.Welcome) -> None:
        self._conversation = self._dialled
        self.name = welcome.scheduler.name
        self.instance = welcome.scheduler.instance
        logger.info("session to %s at %s", self.name or "a scheduler without a name", self.address)
        self._owner.note_change()

    def take(self, message: engine_pb2.SessionResponse, now: float) -> None:
        kind = message.WhichOneof("message")
        if kind == "outputs":
            self._deliver(message.outputs, now)
        elif kind == "load":
            self._take_load(wire.load_of(message.load), now)
        elif kind == "model":
            self.model = wire.model_of(message.model.card)
            self._owner.note_change()
        elif kind == "draining":
            self.draining = True
            self._owner.note_change()

    def tick(self, now: float) -> None:
        """Cut readers that take nothing."""
        slow = [
            rider.stream
            for rider in self._riders.values()
            if rider.stream.pending_since is not None and now - rider.stream.pending_since > self._slow_client_timeout
        ]
        if slow:
            self.abort(tuple(slow), AbortReason.SLOW_CLIENT)
            message = f"the client has not read its stream for {self._slow_client_timeout:g} s"
            for stream in slow:
                stream.fail(TrivetError(ErrorKind.CANCELLED, message))

    # ---- what comes down ----

    def _deliver(self, outputs: engine_pb2.StepOutputs, now: float) -> None:
        if self.model is None:
            raise SessionLostError("outputs came before a model")
        # The whole message is read before any of it counts.
        rows = wire.deltas_of(outputs, vocab_size=self.model.vocab_size)
        errors = wire.errors_of(outputs)
        # A failed child's row has a finish reason too, which must not end its stream as if all were well: errors go first.
        for handle, error in errors.items():
            self._take_error(handle, error)
        for handle, delta in rows:
            if handle not in errors:
                self._take_row(handle, delta, now)

    def _take_row(self, handle: int, delta: TokenDelta, now: float) -> None:
        rider = self._riders.get(handle)
        if rider is None:
            self._take_overrun(handle, ended=delta.finish_reason is not None)
            return
        if delta.finish_reason is not None:
            del self._riders[handle]
        if delta.finish_reason is FinishReason.ERROR:
            rider.stream.fail(TrivetError(ErrorKind.INTERNAL, "the engine could not finish this request and did not say why"))
            return
        rider.submission.heard_at = now
        if delta.token_ids:
            rider.submission.troubles = None
        rider.stream.push(delta, now=now)

    def _take_error(self, handle: int, error: TrivetError) -> None:
        rider = self._riders.pop(handle, None)
        if rider is None:
            self._take_overrun(handle, ended=True)
        elif error.kind is ErrorKind.UNAVAILABLE and error.retryable:
            # The scheduler gives it back; children that it still has must not run twice.
            self.release(rider.submission)
            self._owner.take_back(rider.submission, self, error)
        elif error.kind is ErrorKind.UNIMPLEMENTED and rider.submission.moved:
            # What the client asked for was served before: this scheduler only cannot take it over.
            rider.stream.fail(wire.lost_error())
        else:
            rider.stream.fail(error)

    def _take_overrun(self, handle: int, *, ended: bool) -> None:
        """What comes for a handle that was let go here; its finish is the last."""
        if handle not in self._leaving:
            raise SessionLostError(f"a row came for handle {handle}, which is not running")
        if ended:
            self._leaving.remove(handle)

    def _take_load(self, load: LoadReport, now: float) -> None:
        was_ready = self.ready
        self.load, self.load_at = load, now
        self.added_since_load = 0
        if self.ready != was_ready:
            self._owner.note_change()

    def _reset(self) -> int:
        """Forget the stream and give back what rode on it; returns how many requests that were."""
        self._conversation = None
        self.model = None
        self.load = None
        self.draining = False
        self.added_since_load = 0
        self._leaving.clear()
        lost = self.submissions
        self._riders.clear()
        for submission in lost:
            submission.carrier = None
            self._owner.take_back(submission, self, wire.lost_error())
        self._owner.note_change()
        return len(lost)
