"""The engine: the core, the replicas that it drives and the sessions that it serves, on one event loop.

It owns the pump: whenever something changed (a request came, a step was answered, a replica is ready) it schedules what can be
scheduled, sends the steps, and only then hands out what is new, so that no worker waits for a frontend.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Protocol

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.bundles import BundleStore
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.core import Scheduler
from trivet_scheduler.plan import Delta, StepPlan
from trivet_scheduler.replica import Replica

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 0.1


class ReplicaLink(Protocol):
    """What the engine needs of an attached worker."""

    replica: Replica
    fingerprint: types_pb2.Fingerprint
    card: types_pb2.ModelCard

    def send_step(self, plan: StepPlan) -> None: ...

    def oldest_step_age(self) -> float | None:
        """Seconds since the oldest unanswered step was sent; None without one."""
        ...


class SessionOwner(Protocol):
    """Whoever asked for a request: takes its deltas."""

    def take_delta(self, delta: Delta) -> None: ...

    def take_model(self, card: types_pb2.ModelCard) -> None: ...


class Engine:
    """One per process."""

    def __init__(self, settings: SchedulerSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.core = Scheduler(settings.core, clock)
        self.bundles = BundleStore()
        self.instance = os.urandom(16)
        self.card: types_pb2.ModelCard | None = None
        self.draining = False
        self._links: list[ReplicaLink] = []
        self._sessions: list[SessionOwner] = []
        self._epochs = 0
        self._pump_due = False
        self._last_answer = clock.monotonic()
        self.observe_step: Callable[[float, int], None] = lambda seconds, tokens: None

    # ---- who is there ----

    def next_epoch(self) -> types_pb2.Epoch:
        self._epochs += 1
        return types_pb2.Epoch(instance=self.instance, counter=self._epochs)

    def add_session(self, session: SessionOwner) -> None:
        self._sessions.append(session)

    def remove_session(self, session: SessionOwner) -> None:
        """Its requests are nobody's any more."""
        self._sessions.remove(session)
        for request in [request for request in self.core.requests if request.owner is session]:
            self.core.abort(request)
        self.wake()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_replicas(self) -> int:
        return len(self._links)

    def check_fingerprint(self, name: str, fingerprint: types_pb2.Fingerprint) -> None:
        """Two different models never serve one scheduler. Raises FAILED_PRECONDITION with both named."""
        for link in self._links:
            if link.fingerprint != fingerprint:
                raise TrivetError(
                    ErrorKind.FAILED_PRECONDITION,
                    f"replica {name} serves another model than {link.replica.name}: {_short(fingerprint)} and {_short(link.fingerprint)}",
                )

    def attach(self, link: ReplicaLink) -> None:
        """A replica is ready for steps."""
        self._links.append(link)
        self.core.attach(link.replica)
        card = types_pb2.ModelCard()
        card.CopyFrom(link.card)
        card.kv_capacity_tokens = self.core.capacity_tokens
        if card != self.card:
            self.card = card
            for session in self._sessions:
                session.take_model(card)
        pool = link.replica.kv.pool
        logger.info("replica %s is ready: %d KV blocks of %d tokens", link.replica.name, pool.capacity, link.replica.kv.block_size)
        if link.replica.kv.capacity_tokens < card.max_model_len:
            logger.warning(
                "the KV cache of replica %s holds %d tokens, less than the context of %d: longer requests end early or are refused",
                link.replica.name,
                link.replica.kv.capacity_tokens,
                card.max_model_len,
            )
        self.wake()

    def detach(self, link: ReplicaLink, reason: str) -> None:
        """Its requests go back to the queue."""
        if link not in self._links:
            return
        self._links.remove(link)
        self.core.detach(link.replica)
        logger.warning("replica %s is lost (%s); its requests wait for another", link.replica.name, reason)
        self.wake()

    # ---- the pump ----

    def wake(self) -> None:
        """Something changed: pump once this turn of the loop is over, so that what comes together is scheduled together."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def answered(self, link: ReplicaLink, seconds: float, tokens: int) -> None:
        """A step was answered and taken in."""
        self._last_answer = self.clock.monotonic()
        self.observe_step(seconds, tokens)
        self._pump()

    def _pump(self) -> None:
        self._pump_due = False
        for link in self._links:
            while (plan := self.core.schedule(link.replica)) is not None:
                link.send_step(plan)
        for delta in self.core.take_deltas():
            owner = delta.request.owner
            if owner in self._sessions:
                owner.take_delta(delta)

    async def expire_forever(self) -> None:
        """End late requests."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.core.expire()
            self._pump()

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until no request is left; False when time ran out first."""
        end = self.clock.monotonic() + timeout_s
        while self.core.requests and self.clock.monotonic() < end:
            await asyncio.sleep(EXPIRE_EVERY_S)
        return not self.core.requests

    # ---- what it says of itself ----

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return bool(self._links) and not self.draining

    def load(self) -> engine_pb2.Load:
        core, pools = self.core, [link.replica.kv.pool for link in self._links]
        totals = core.totals
        held, capacity = sum(pool.num_held for pool in pools), sum(pool.capacity for pool in pools)
        report = engine_pb2.Load(
            requests_running=core.num_running,
            requests_waiting=len(core.waiting),
            waiting_uncached_tokens=core.waiting.num_uncached_tokens,
            kv_cache_usage=held / capacity if capacity else 0.0,
            replicas_ready=0 if self.draining else len(self._links),
            blocks_in_use=held,
            blocks_total=capacity,
            preemptions_total=totals.preemptions,
            prefix_cache_queries_total=totals.prefix_queries,
            prefix_cache_hits_total=totals.prefix_hits,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            paused=core.paused,
        )
        if core.requests:
            report.last_step_age_ms = int((self.clock.monotonic() - self._last_answer) * 1000)
        return report


def _short(fingerprint: types_pb2.Fingerprint) -> str:
    return f"weights {fingerprint.weights.hex()[:12]}, {fingerprint.dtype}, KV {fingerprint.kv_dtype}"
