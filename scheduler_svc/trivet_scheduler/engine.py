"""The engine: the core, the replicas that it drives and the sessions that it serves, on one event loop.

It owns the pump: whenever something changed (a request came, a step was answered, a replica is ready) it schedules what can be
scheduled, sends the steps, and only then hands out what is new, so that no worker waits for a frontend.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_scheduler.awake import STEADY, Pulse
from trivet_scheduler.bundles import BundleStore
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.core import Scheduler
from trivet_scheduler.model_check import check_same_model
from trivet_scheduler.plan import Delta, StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.sleep import AWAKE, Sleep
from trivet_scheduler.stream_end import StreamEnd

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 0.1


class ReplicaLink(Protocol):
    """What the engine needs of an attached worker."""

    name: str
    replica: Replica
    card: types_pb2.ModelCard
    stream: StreamEnd
    is_draining: bool

    def send_step(self, plan: StepPlan) -> None: ...

    async def control(self, control: worker_pb2.Control) -> None:
        """Return when the worker has done it. Raises what it answers, UNAVAILABLE when its stream ends first."""
        ...

    @property
    def step_age_s(self) -> float | None:
        """Seconds that the oldest unanswered step runs; None without one, or when its age says nothing."""
        ...

    @property
    def step_limit_s(self) -> float:
        """Seconds that the oldest unanswered step is given."""
        ...


class SessionOwner(Protocol):
    """Whoever asked for a request: takes its deltas."""

    def take_delta(self, delta: Delta) -> None: ...

    def take_model(self, card: types_pb2.ModelCard) -> None: ...

    def take_readiness(self) -> None:
        """A request sent now may fare otherwise than before: a worker came or went, or the engine pauses, goes on or drains."""
        ...


@dataclass(slots=True)
class EngineTotals:
    """Counters since the start."""

    replicas_lost: int = 0
    requests_requeued: int = 0
    stale_messages: int = 0  # of older epochs, dropped


class Engine:
    """One per process."""

    def __init__(self, settings: SchedulerSettings, clock: Clock, pulse: Pulse = STEADY) -> None:
        self.settings = settings
        self.clock = clock
        self.pulse = pulse
        self.core = Scheduler(settings.core, clock)
        self.bundles = BundleStore()
        self.instance = os.urandom(16)
        self.card: types_pb2.ModelCard | None = None
        self.draining = False
        self.frozen = False  # nothing is sent to workers until it is lifted
        self.sleep = Sleep(lambda: tuple(self.links), still=self._become_still, go_on=self._go_on)
        self.totals = EngineTotals()
        self.links: list[ReplicaLink] = []  # ready ones
        self.sessions: list[SessionOwner] = []
        self._epochs = 0
        self._pump_due = False
        self._pumped = asyncio.Event()
        self._without_replica_since = clock.monotonic()
        self.observe_step: Callable[[float, int], None] = lambda seconds, tokens: None
        self.on_ready_change: Callable[[], None] = lambda: None

    # ---- who is there ----

    def next_epoch(self) -> types_pb2.Epoch:
        self._epochs += 1
        return types_pb2.Epoch(instance=self.instance, counter=self._epochs)

    def add_session(self, session: SessionOwner) -> None:
        self.sessions.append(session)

    def remove_session(self, session: SessionOwner) -> None:
        """Its requests are nobody's any more."""
        if session not in self.sessions:
            return
        self.sessions.remove(session)
        for request in [request for request in self.core.requests if request.owner is session]:
            self.core.abort(request)
        self.wake()

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def num_replicas(self) -> int:
        return len(self.links)

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self.draining and self.sleep.level == AWAKE and any(not link.is_draining for link in self.links)

    def check_model(self, name: str, card: types_pb2.ModelCard) -> None:
        """Two different models never serve one scheduler. Raises FAILED_PRECONDITION with both named."""
        for link in self.links:
            if link.name != name:  # its own older life is about to end
                check_same_model(card, name, link.card, link.name)

    def attach(self, link: ReplicaLink) -> None:
        """A replica is ready for steps. Raises FAILED_PRECONDITION when another model became ready before it."""
        self.check_model(link.name, link.card)
        self._forget_other_model(link)
        self.links.append(link)
        self.core.attach(link.replica)
        self.sleep.take_late(link)
        self._show_model(link.card)
        kv = link.replica.kv
        logger.info("replica %s is ready: %d KV blocks of %d tokens", link.name, kv.pool.capacity, kv.block_size)
        if kv.capacity_tokens < link.card.max_model_len:
            logger.warning(
                "the KV cache of replica %s holds %d tokens, less than the context of %d: longer requests end early or are refused",
                link.name,
                kv.capacity_tokens,
                link.card.max_model_len,
            )
        self._tell_readiness()
        self.wake()

    def _forget_other_model(self, link: ReplicaLink) -> None:
        """Requests that waited for a lost worker cannot go on with another model."""
        if self.card is None or self.card.fingerprint == link.card.fingerprint:
            return
        error = TrivetError(ErrorKind.UNAVAILABLE, "the worker that served this request is lost, and the next one serves another model")
        for request in list(self.core.requests):
            self.core.fail(request, error)

    def _show_model(self, announced: types_pb2.ModelCard) -> None:
        card = types_pb2.ModelCard()
        card.CopyFrom(announced)
        card.kv_capacity_tokens = self.core.capacity_tokens
        if card != self.card:
            self.card = card
            for session in self.sessions:
                session.take_model(card)

    def _tell_readiness(self) -> None:
        self.on_ready_change()
        for session in self.sessions:
            session.take_readiness()

    def drain(self, link: ReplicaLink) -> None:
        """Nothing new goes there; its stream ends when nothing runs there any more."""
        if link in self.links:
            self.core.drain(link.replica)
            self._tell_readiness()
            self.wake()

    def detach(self, link: ReplicaLink, reason: str) -> None:
        """Its requests go back to the queue, and its answers count no more."""
        if link not in self.links:
            return
        self.links.remove(link)
        requeued = len(link.replica.running)
        self.core.detach(link.replica)
        self.totals.requests_requeued += requeued
        if link.is_draining or self.draining:
            logger.info("replica %s has left (%s); %d of its requests wait for another", link.name, reason, requeued)
        else:
            self.totals.replicas_lost += 1
            logger.warning("replica %s is lost (%s); %d of its requests wait for another", link.name, reason, requeued)
        if self.links:
            self._show_model(self.links[0].card)  # the largest replica may have been this one
        else:
            self._without_replica_since = self.clock.monotonic()
        self._tell_readiness()
        self.wake()

    # ---- the pump ----

    def wake(self) -> None:
        """Something changed: pump once this turn of the loop is over, so that what comes together is scheduled together."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def answered(self, seconds: float, tokens: int) -> None:
        """A step was answered and taken in."""
        self.observe_step(seconds, tokens)
        self._pump()

    def _pump(self) -> None:
        self._pump_due = False
        for link in () if self.frozen else tuple(self.links):
            while (plan := self.core.schedule(link.replica)) is not None:
                link.send_step(plan)
        for delta in self.core.take_deltas():
            owner = delta.request.owner
            if owner in self.sessions:
                owner.take_delta(delta)
        for link in tuple(self.links):
            if link.is_draining and self.core.is_drained(link.replica):
                link.stream.decide(None)
        self._pumped.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is looked at whenever something changed."""
        while not condition():
            self._pumped.clear()
            await self._pumped.wait()

    async def expire_forever(self) -> None:
        """End late requests."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.core.expire()
            self.give_up_waiting()
            self._pump()

    def give_up_waiting(self) -> None:
        """With no replica for too long, end what waits for one: who asked may know another scheduler, or tell its client."""
        if self.links:
            return
        limit, now = self.settings.replica_timeout, self.clock.monotonic()
        error = TrivetError(ErrorKind.UNAVAILABLE, f"there has been no worker for {limit:g} s", retryable=True)
        for request in list(self.core.requests):
            if now - max(self._without_replica_since, request.arrived_at) >= limit:
                self.core.fail(request, error)

    # ---- pausing and leaving ----

    def pause(self, *, freeze: bool) -> None:
        """Admit nothing new; what runs goes on, or stays where it is."""
        self.core.paused, self.frozen = True, freeze
        self._tell_readiness()
        self.wake()

    def resume(self) -> None:
        """Raises FAILED_PRECONDITION while the workers sleep."""
        if self.sleep.level != AWAKE:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, "the workers are asleep; WakeUp wakes them and resumes")
        self._go_on()

    def _go_on(self) -> None:
        self.core.paused = self.frozen = False
        self._tell_readiness()
        self.wake()

    async def _become_still(self) -> None:
        """Nothing is in flight, and what ran waits with the tokens it has."""
        self.pause(freeze=True)
        await self.until(lambda: not any(link.replica.flights for link in self.links))
        self.core.reset_prefix_cache(preempt_running=True)
        self._tell_readiness()

    def abort_all(self) -> None:
        for request in list(self.core.requests):
            self.core.abort(request)
        self.wake()

    @property
    def is_quiet(self) -> bool:
        """Nothing runs: no request is on a replica and no step is unanswered."""
        return self.core.num_running == 0 and not any(link.replica.flights for link in self.links)

    def begin_draining(self) -> None:
        """Take nothing new, and hand back what has not begun: elsewhere it need not wait for us."""
        self.draining = True
        begun = {request.spec.uid for request in self.core.requests if request not in self.core.waiting}
        self.hand_back(lambda spec_uid: spec_uid not in begun)
        self._tell_readiness()

    def hand_back(self, which: Callable[[bytes], bool] = lambda uid: True) -> int:
        """End requests, chosen by uid, with an error that says: elsewhere, with the tokens you have. Returns how many."""
        error = TrivetError(ErrorKind.UNAVAILABLE, "this scheduler is shutting down")
        chosen = [request for request in self.core.requests if which(request.spec.uid)]
        for request in chosen:
            self.core.fail(request, error)
        self.wake()
        return len(chosen)
