"""Token in, token out: the engine as the rooms above use it, whatever the number of schedulers.

The client owns the sessions, the router, the bundles and the requests that are between two schedulers. The list of schedulers may hold
names, each of whose addresses is a scheduler of its own; the list is followed, and a session that is no longer listed is let go when its
stream ends. A request goes to one scheduler; when that one is lost or gives it back, it is handed over (`handover.py`).
"""

import asyncio
import logging
from collections.abc import Sequence, Set
from functools import partial

from trivet_chassis.clock import Clock
from trivet_chassis.resolving import RESOLVE_INTERVAL_S, Lookup, Peers, look_up
from trivet_chassis.rpc import Dial, create_channel
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine.bundle import BundleCache
from trivet_frontend.engine.changes import Changes
from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.handover import HandOver
from trivet_frontend.engine.identity import Identity
from trivet_frontend.engine.request import EngineRequest
from trivet_frontend.engine.routing import Router
from trivet_frontend.engine.session import SchedulerSession
from trivet_frontend.engine.submission import Submission

logger = logging.getLogger(__name__)

DEFAULT_HANDOVER_SECONDS = 60.0


class EngineClient:
    """All schedulers that this frontend knows."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        identity: Identity,
        clock: Clock,
        slow_client_timeout: float,
        handover_timeout: float = DEFAULT_HANDOVER_SECONDS,
        dial: Dial = create_channel,
        lookup: Lookup = look_up,
        resolve_interval: float = RESOLVE_INTERVAL_S,
    ) -> None:
        """Raises INVALID_ARGUMENT for an address that is none. Times are in seconds."""
        self.changes = Changes()
        self._peers = Peers(addresses, name="scheduler", lookup=lookup, interval_s=resolve_interval)
        self._dial = dial
        self._identity = identity
        self._clock = clock
        self._slow_client_timeout = slow_client_timeout
        self._router = Router()
        self._bundles = BundleCache(dial)
        self._handover = HandOver(clock=clock, limit_seconds=handover_timeout, choose=self._choose)
        self._sessions: dict[str, SchedulerSession] = {}
        self._session_tasks: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._displaced: TrivetError | None = None

    def start(self) -> None:
        """Begin to dial; returns at once."""
        self._adopt(self._peers.addresses)
        self._tasks.append(asyncio.create_task(self._handover.run(), name="hand requests over"))
        if not self._peers.are_fixed:
            self._tasks.append(asyncio.create_task(self._peers.follow(self._adopt), name="look schedulers up"))

    async def close(self) -> None:
        """End the sessions; what still runs on them fails."""
        self._closing = True
        self._handover.close()
        tasks = [*self._tasks, *self._session_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._session_tasks.clear()

    # ---- state ----

    @property
    def model(self) -> ModelDescription | None:
        """The model of the first scheduler that has one: all of a frontend's schedulers serve the same."""
        return next((session.model for session in self._sessions.values() if session.model is not None), None)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return any(session.ready for session in self._sessions.values())

    @property
    def live_streams(self) -> int:
        """Children that ride on a session."""
        return sum(session.live_streams for session in self._sessions.values())

    @property
    def handles(self) -> int:
        """Handles of which a scheduler may still say something, and requests that are between two schedulers."""
        return sum(session.handles for session in self._sessions.values()) + len(self._handover.submissions)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where there is a session, whether its stream is up or not."""
        return tuple(self._sessions)

    def loads(self) -> list[tuple[str, LoadReport]]:
        """The last report of each scheduler that is connected, by the scheduler's name; equal names are told apart by their address."""
        connected = [session for session in self._sessions.values() if session.load is not None]
        names = [session.name or session.address for session in connected]
        return [
            (name if names.count(name) == 1 else f"{name}@{session.address}", session.load)
            for name, session in zip(names, connected, strict=True)
            if session.load is not None
        ]

    def progress(self) -> tuple[bool, float | None]:
        """Whether requests are at the engine, and for how many seconds the one that waits longest has neither heard anything nor had a
        scheduler that makes steps; None when that is not known."""
        now = self._clock.monotonic()
        ages = [now - submission.heard_at for submission in self._handover.submissions]
        for session in self._sessions.values():
            stepped = None
            if session.load is not None and session.load.last_step_age_ms is not None:
                stepped = session.load.last_step_age_ms / 1000 + now - session.load_at
            for submission in session.submissions:
                silent = now - submission.heard_at
                ages.append(silent if stepped is None else min(silent, stepped))
        return bool(ages), max(ages, default=None)

    async def wait_for_model(self) -> ModelDescription:
        while True:
            seen = self.changes.count
            if self.model is not None:
                return self.model
            await self.changes.after(seen)

    async def until_displaced(self) -> TrivetError:
        """The scheduler's words, once another process has taken this frontend's name there: this one must leave."""
        while True:
            seen = self.changes.count
            if self._displaced is not None:
                return self._displaced
            await self.changes.after(seen)

    async def fetch_bundle(self, model: ModelDescription) -> bytes:
        """The bundle of `model` from any scheduler that serves it; raises the last one's `TrivetError` if none gives it."""
        failure = TrivetError(ErrorKind.UNAVAILABLE, "no scheduler is connected", retryable=True)
        for session in list(self._sessions.values()):
            if session.model is None or session.model.bundle_digest != model.bundle_digest:
                continue
            try:
                return await self._bundles.get(session.address, model.bundle_digest)
            except TrivetError as error:
                failure = error
        raise failure

    # ---- requests ----

    def submit(self, request: EngineRequest, *, model: ModelDescription) -> Submission:
        """Send `request`, tokenized for `model`, to a scheduler of that model; raises UNAVAILABLE when there is none."""
        submission = Submission(request, fingerprint=model.fingerprint, now=self._clock.monotonic(), on_end=self._handover.forget)
        session = self._choose(submission, frozenset())
        try:
            if session is None:
                raise TrivetError(ErrorKind.UNAVAILABLE, "no scheduler with a ready worker is connected", retryable=True)
            session.carry(submission)
        except TrivetError as error:
            submission.fail(error)
            raise
        return submission

    def announce_draining(self, deadline_ms: int) -> None:
        for session in self._sessions.values():
            session.announce_draining(deadline_ms)

    def _choose(self, submission: Submission, avoided: Set[str]) -> SchedulerSession | None:
        candidates = [
            session
            for session in self._sessions.values()
            if session.ready
            and session.model is not None
            and session.model.fingerprint == submission.fingerprint
            and session.address not in avoided
        ]
        return self._router.choose(candidates, submission.request.prompt_ids) if candidates else None

    # ---- sessions ----

    def note_change(self) -> None:
        """For the sessions: one came, went, drains, or learned of a model or of readiness."""
        for session in self._sessions.values():
            if session.draining:
                self._move_waiting(session)
        self._handover.wake()
        self.changes.note()

    def take_back(self, submission: Submission, session: SchedulerSession, error: TrivetError) -> None:
        """For the sessions: a request rides nowhere now."""
        if session.connected:
            self._handover.take_refused(submission, error, session.address)
        else:
            self._handover.take_lost(submission, error)

    async def until_wanted(self, session: SchedulerSession) -> None:
        """Return when `session` should be dialled: not while another has a stream to the same process under another address, since a
        scheduler keeps one stream a frontend and would end the other."""
        while True:
            seen = self.changes.count
            others = [other for other in self._sessions.values() if other is not session and other.connected]
            if not session.instance or all(other.instance != session.instance for other in others):
                return
            await self.changes.after(seen)

    def _move_waiting(self, session: SchedulerSession) -> None:
        """A scheduler that leaves: what has no token yet need not wait for its end, if another takes it."""
        for submission in session.submissions:
            if submission.is_waiting and (other := self._choose(submission, {session.address})) is not None:
                session.release(submission)
                submission.moved = True
                other.carry(submission)

    def _adopt(self, addresses: tuple[str, ...]) -> None:
        """Have a session for each of `addresses`, and none for others once their stream has ended."""
        for address in addresses if self._displaced is None else ():
            if address in self._sessions:
                self._sessions[address].is_listed = True
                continue
            session = SchedulerSession(
                address,
                dial=self._dial,
                identity=self._identity,
                clock=self._clock,
                slow_client_timeout=self._slow_client_timeout,
                owner=self,
            )
            self._sessions[address] = session
            task = asyncio.create_task(session.run(), name=f"session to {address}")
            self._session_tasks[address] = task
            task.add_done_callback(partial(self._dismiss, session))
        for address, session in self._sessions.items():
            if address not in addresses and session.is_listed:
                logger.info("the scheduler at %s is no longer listed", address)
                session.is_listed = False
                if not session.connected:
                    self._session_tasks[address].cancel()

    def _dismiss(self, session: SchedulerSession, task: asyncio.Task[None]) -> None:
        self._sessions.pop(session.address, None)
        self._session_tasks.pop(session.address, None)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, TrivetError) and failure.kind is ErrorKind.ALREADY_EXISTS:
            logger.error("the session to the scheduler at %s is not dialled again: %s", session.address, failure.message)
            self._displaced = failure.with_traceback(None)
        elif failure is not None:
            logger.error("the session to %s died", session.address, exc_info=failure)
        if not self._closing:
            if self._displaced is None:
                # It may have come back while it was being let go.
                self._adopt(self._peers.addresses)
            self.note_change()
