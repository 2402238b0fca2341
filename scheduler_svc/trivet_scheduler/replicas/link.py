"""One attached worker: its stream, its epoch, its heartbeats.

Life: `Hello` → `Configure` (the KV cache to allocate) → `Ready` → steps → perhaps `Draining`. The link ends when the stream does, when
three heartbeats are missing, when a step is overdue, when a newer stream of its name comes, or when the worker breaks the contract. At that
very moment the engine requeues what ran there, and nothing that still comes in counts any more.
"""

import asyncio
import logging

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_scheduler.awake import AwakeTimer
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.kv.registry import ManagerRegistry
from trivet_scheduler.plan import StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.replicas.controls import OpenControls
from trivet_scheduler.replicas.hello import check_hello, configure_ranks, limits_of
from trivet_scheduler.replicas.result_parts import ResultParts
from trivet_scheduler.replicas.step_watch import StepWatch
from trivet_scheduler.replicas.verification import verify
from trivet_scheduler.replicas.wire import config_message, outcome_of, step_messages
from trivet_scheduler.stream_end import StreamEnd

logger = logging.getLogger(__name__)

Outgoing = worker_pb2.AttachResponse


class WorkerLink:
    """The scheduler's end of one `Attach` stream."""

    def __init__(self, engine: Engine, registry: ManagerRegistry, hello: worker_pb2.WorkerHello) -> None:
        """Raises INVALID_ARGUMENT or FAILED_PRECONDITION, with what must change, for a worker that cannot serve here."""
        check_hello(hello)
        self.name = hello.hello.name
        self.instance = hello.hello.instance
        self.card = hello.card
        engine.check_model(self.name, self.card)
        self.epoch = engine.next_epoch()
        self.stream = StreamEnd(self._on_end)
        self.is_draining = False
        self._engine = engine
        self._configs = configure_ranks(hello, registry)
        smallest = min(self._configs, key=lambda config: config.num_blocks)
        self.replica = Replica(self.name, KVCacheCoordinator(smallest, registry), limits_of(hello))
        self._num_blocks = smallest.num_blocks
        self._out: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._silence = AwakeTimer(engine.clock, engine.pulse.tick_s)
        self._steps = StepWatch(engine.settings.step_limits, engine.clock, engine.pulse.tick_s)
        self._parts = ResultParts()
        self._controls = OpenControls()
        self._is_ready = False
        self._deadline: asyncio.TimerHandle | None = None

    # ---- down ----

    def configure(self, scheduler_name: str) -> None:
        """Answer the hello."""
        message = worker_pb2.Configure(
            epoch=self.epoch,
            scheduler=types_pb2.Hello(name=scheduler_name, instance=self._engine.instance, schema=SCHEMA),
            ranks=[config_message(config) for config in self._configs],
            bundle_wanted=self.card.bundle_sha256 not in self._engine.bundles,
            steps_in_flight=min(self._engine.settings.steps_in_flight, self.replica.limits.steps_in_flight),
        )
        self._out.put_nowait(Outgoing(configure=message))

    async def control(self, control: worker_pb2.Control) -> None:
        """Return when the worker has done it. Raises what it answers, UNAVAILABLE when its stream ends first."""
        numbered, done = self._controls.begin(control)
        self._out.put_nowait(Outgoing(control=numbered))
        await done

    def send_step(self, plan: StepPlan) -> None:
        self._steps.sent(plan.forecast_s)
        for step in step_messages(plan, self.epoch, self.card.eos_token_ids):
            self._out.put_nowait(Outgoing(step=step))

    def announce_drain(self, deadline_ms: int, reason: str) -> None:
        """The scheduler is leaving."""
        self._out.put_nowait(Outgoing(drain=worker_pb2.Drain(deadline_ms=deadline_ms, reason=reason)))

    async def next_message(self) -> Outgoing:
        """What to send; a heartbeat when there was nothing else for a beat."""
        if not self._out.empty():
            return self._out.get_nowait()
        try:
            async with asyncio.timeout(self._engine.pulse.beat_s):
                return await self._out.get()
        except TimeoutError:
            return Outgoing(heartbeat=types_pb2.Heartbeat())

    # ---- up ----

    def take(self, message: worker_pb2.AttachRequest) -> None:
        """One message of the worker. Raises when it breaks the contract; what a newer worker may say besides is left alone."""
        if self.stream.is_decided:
            return
        self._silence.reset()
        kind = message.WhichOneof("message")
        if kind == "result":
            self._take_result(message.result)
        elif kind == "ready":
            self._take_ready(message.ready)
        elif kind == "heartbeat":
            self._steps.heard_activity(message.heartbeat.activity)
        elif kind == "events":
            self._is_stale(message.events.epoch)  # no transfers are granted yet, so there is nothing else to note
        elif kind == "reply":
            self._controls.take(message.reply)
        elif kind == "lost":
            self._lose(f"rank {message.lost.rank} is lost: {message.lost.reason}", ErrorKind.UNAVAILABLE)
        elif kind == "draining":
            self._drain(message.draining)
        elif kind == "hello":
            raise invalid("a second hello on one stream")

    def _is_stale(self, epoch: types_pb2.Epoch) -> bool:
        """Of an older life of this replica: it counts, and that is all."""
        if epoch == self.epoch:
            return False
        self._engine.totals.stale_messages += 1
        return True

    def _take_ready(self, ready: worker_pb2.Ready) -> None:
        if self._is_stale(ready.epoch) or self._is_ready:
            return
        if ready.num_blocks not in (0, self._num_blocks):
            raise invalid(f"the worker is ready with {ready.num_blocks} KV blocks, {self._num_blocks} were configured", "num_blocks")
        if self.card.bundle_sha256 and self.card.bundle_sha256 not in self._engine.bundles:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, "the worker is ready but has not brought its model bundle (PutBundle)")
        self._is_ready = True
        self._engine.attach(self)

    def _take_result(self, result: worker_pb2.StepResult) -> None:
        if self._is_stale(result.epoch):
            return
        whole = self._parts.join(result)
        if whole is None:
            return
        outcome = outcome_of(whole)
        flight = self.replica.flights[0] if self.replica.flights else None
        if flight is not None and flight.number == outcome.number:
            verify(outcome, flight, self.card.vocab_size)
        self._engine.core.update(self.replica, outcome)
        assert flight is not None, "update refuses an answer to nothing"
        if outcome.is_last:
            self._steps.answered()
        else:
            self._steps.progressed()
        if whole.status == worker_pb2.STEP_STATUS_FAILED:
            logger.warning("step %d of replica %s failed: %s", whole.step, self.name, whole.error.message)
        self._engine.answered(self._engine.clock.monotonic() - flight.sent_at, flight.num_tokens)

    def _drain(self, draining: types_pb2.Draining) -> None:
        """Nothing new goes there; what runs there goes on until the deadline, and is requeued then."""
        if self.is_draining:
            return
        self.is_draining = True
        logger.info("replica %s is draining, %.3g s are left: %s", self.name, draining.deadline_ms / 1000, draining.reason)
        if not self._is_ready or draining.deadline_ms == 0:
            self.stream.decide(None)
            return
        self._deadline = asyncio.get_running_loop().call_later(draining.deadline_ms / 1000, self.stream.decide, None)
        self._engine.drain(self)

    # ---- its end ----

    @property
    def step_age_s(self) -> float | None:
        return self._steps.age_s

    @property
    def step_limit_s(self) -> float:
        return self._steps.limit_s

    def _lose(self, reason: str, kind: ErrorKind = ErrorKind.ABORTED) -> None:
        self.stream.decide(TrivetError(kind, f"replica {self.name}: {reason}"))

    def _on_end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        error = self.stream.error
        self._controls.give_up(f"replica {self.name} left before it answered")
        self._engine.detach(self, "it has drained" if error is None else error.message)

    async def watch(self) -> None:
        """End the link of a worker that is silent or stuck."""
        pulse = self._engine.pulse
        while not self.stream.is_decided:
            await asyncio.sleep(pulse.tick_s)
            if self._silence.tick() > pulse.silence_s:
                self._lose(f"no heartbeat for {pulse.silence_s:g} s")
            overdue = self._steps.overdue()
            if overdue is not None:
                self._lose(overdue)
