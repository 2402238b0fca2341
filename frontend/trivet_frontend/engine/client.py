"""Token in, token out: the engine as the rooms above use it, whatever the number of schedulers.

The client owns the sessions, the router and the bundles. A request goes to one scheduler; when that one is lost the request's streams
fail with a retryable UNAVAILABLE. `Submission` keeps what a hand-over to another scheduler needs: the request, and the tokens each stream
has delivered.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine.bundle import BundleCache
from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.identity import Identity
from trivet_frontend.engine.request import EngineRequest
from trivet_frontend.engine.routing import Router
from trivet_frontend.engine.session import SchedulerSession, Submission

logger = logging.getLogger(__name__)


class EngineClient:
    """All schedulers that this frontend knows."""

    def __init__(self, addresses: Sequence[str], *, identity: Identity, clock: Clock, slow_client_timeout: float) -> None:
        self._changed = asyncio.Event()
        self._router = Router()
        self._bundles = BundleCache()
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions = [
            SchedulerSession(
                address,
                identity=identity,
                clock=clock,
                slow_client_timeout=slow_client_timeout,
                on_change=self._notice_change,
            )
            for address in addresses
        ]

    def start(self) -> None:
        """Begin to dial; returns at once."""
        for session in self._sessions:
            self._tasks.append(asyncio.create_task(session.run(), name=f"session to {session.address}"))

    async def close(self) -> None:
        """End the sessions; what still runs on them fails."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    # ---- state ----

    @property
    def model(self) -> ModelDescription | None:
        """The model of the first scheduler that has one: all of a frontend's schedulers serve the same."""
        return next((session.model for session in self._sessions if session.model is not None), None)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return any(session.ready for session in self._sessions)

    @property
    def live_streams(self) -> int:
        return sum(session.live_streams for session in self._sessions)

    def loads(self) -> list[tuple[int, LoadReport]]:
        """The last report of each scheduler that is connected, by its place in the list of addresses."""
        return [(place, session.load) for place, session in enumerate(self._sessions) if session.load is not None]

    async def wait_for_change(self) -> None:
        """Return when a session came, went, or learned of a model or of readiness."""
        await self._changed.wait()
        self._changed.clear()

    async def wait_for_model(self) -> ModelDescription:
        while (model := self.model) is None:
            await self.wait_for_change()
        return model

    async def fetch_bundle(self, model: ModelDescription) -> bytes:
        """The bundle of `model` from any scheduler that serves it; raises the last one's `TrivetError` if none gives it."""
        failure = TrivetError(ErrorKind.UNAVAILABLE, "no scheduler is connected", retryable=True)
        for session in self._sessions:
            if session.model is None or session.model.bundle_digest != model.bundle_digest:
                continue
            try:
                return await self._bundles.get(session.address, model.bundle_digest)
            except TrivetError as error:
                failure = error
        raise failure

    # ---- requests ----

    def submit(self, request: EngineRequest, *, model: ModelDescription, age_ms: int = 0) -> Submission:
        """Send `request`, tokenized for `model`, to a scheduler of that model; raises UNAVAILABLE when there is none."""
        candidates = [
            session
            for session in self._sessions
            if session.ready and session.model is not None and session.model.fingerprint == model.fingerprint
        ]
        if not candidates:
            raise TrivetError(ErrorKind.UNAVAILABLE, "no scheduler with a ready worker is connected", retryable=True)
        return self._router.choose(candidates, request.prompt_ids).add(request, age_ms=age_ms)

    def announce_draining(self, deadline_ms: int) -> None:
        for session in self._sessions:
            session.announce_draining(deadline_ms)

    def _notice_change(self) -> None:
        self._changed.set()
