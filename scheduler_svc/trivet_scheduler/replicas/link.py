"""One attached worker: its stream, its epoch, its heartbeats.

Life: `Hello` → `Configure` (the KV cache to allocate) → `Ready` → steps. The link ends when the stream does, when three heartbeats are
missing, when a step is older than the limit, or when the worker breaks the contract; the engine then requeues what ran there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.revision import SCHEMA, agree
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.kv.memory import KVCacheConfig, configure
from trivet_scheduler.kv.registry import ManagerRegistry
from trivet_scheduler.plan import StepPlan
from trivet_scheduler.replica import Replica, ReplicaLimits
from trivet_scheduler.replicas.wire import config_message, outcome_of, spec_of, step_messages

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.5  # three heartbeats and some


class WorkerLink:
    """The scheduler's end of one `Attach` stream."""

    def __init__(self, engine: Engine, registry: ManagerRegistry, hello: worker_pb2.WorkerHello) -> None:
        """Raises FAILED_PRECONDITION, with what must change, for a worker that cannot serve here."""
        reason = agree(hello.hello.schema)
        if reason is not None:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, reason)
        self.fingerprint = hello.card.fingerprint
        self.card = hello.card
        engine.check_fingerprint(hello.hello.name, self.fingerprint)
        self.epoch = engine.next_epoch()
        self._engine = engine
        self._configs = [_configure_rank(rank, registry) for rank in hello.ranks]
        if not self._configs:
            raise invalid("the worker announced no ranks", "ranks")
        smallest = min(self._configs, key=lambda config: config.num_blocks)
        limits = hello.limits
        self.replica = Replica(
            hello.hello.name,
            KVCacheCoordinator(smallest, registry),
            ReplicaLimits(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                steps_in_flight=max(1, hello.abilities.steps_in_flight),
            ),
        )
        self._out: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self._heard_at = engine.clock.monotonic()
        self._busy_with = types_pb2.ACTIVITY_NONE
        self._ready = False
        self._partial: worker_pb2.StepResult | None = None
        self.ended = asyncio.Event()
        self.end_reason = ""

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
        self._out.put_nowait(worker_pb2.AttachResponse(configure=message))

    def send_step(self, plan: StepPlan) -> None:
        for step in step_messages(plan, self.epoch, self.card.eos_token_ids):
            self._out.put_nowait(worker_pb2.AttachResponse(step=step))

    def drain(self, deadline_ms: int, reason: str) -> None:
        self._out.put_nowait(worker_pb2.AttachResponse(drain=worker_pb2.Drain(deadline_ms=deadline_ms, reason=reason)))

    async def messages(self) -> AsyncIterator[worker_pb2.AttachResponse]:
        """What to send; a heartbeat when there is nothing else for a second. Ends when the link has ended."""
        while True:
            try:
                message = self._out.get_nowait() if not self._out.empty() else await asyncio.wait_for(self._out.get(), HEARTBEAT_S)
            except TimeoutError:
                message = worker_pb2.AttachResponse(heartbeat=types_pb2.Heartbeat())
            if message is None:
                return
            yield message

    # ---- up ----

    def take(self, message: worker_pb2.AttachRequest) -> None:
        """One message of the worker. Raises when it breaks the contract."""
        self._heard_at = self._engine.clock.monotonic()
        kind = message.WhichOneof("message")
        if kind == "result":
            self._take_result(message.result)
        elif kind == "ready":
            self._take_ready(message.ready)
        elif kind == "heartbeat":
            self._busy_with = message.heartbeat.activity
        elif kind == "lost":
            self.end(f"rank {message.lost.rank}: {message.lost.reason}")
        elif kind == "draining":
            self.end("it is draining")
        elif kind == "hello":
            raise invalid("a second hello on one stream")

    def _take_ready(self, ready: worker_pb2.Ready) -> None:
        if ready.epoch != self.epoch or self._ready:
            return
        if self.card.bundle_sha256 and self.card.bundle_sha256 not in self._engine.bundles:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, "the worker is ready but has not brought its model bundle (PutBundle)")
        self._ready = True
        self._engine.attach(self)

    def _take_result(self, result: worker_pb2.StepResult) -> None:
        if result.epoch != self.epoch:
            return  # of an older life of this replica
        whole = self._join(result)
        if whole is None:
            return
        flight = self.replica.flights[0] if self.replica.flights else None
        self._engine.core.update(self.replica, outcome_of(whole))
        if whole.status == worker_pb2.STEP_STATUS_FAILED:
            logger.warning("step %d of replica %s failed: %s", whole.step, self.replica.name, whole.error.message)
        assert flight is not None, "update refuses an answer to nothing"
        self._engine.answered(self, self._engine.clock.monotonic() - flight.sent_at, flight.num_tokens)

    def _join(self, result: worker_pb2.StepResult) -> worker_pb2.StepResult | None:
        """A result in parts: all but the last bring prompt logprobs alone."""
        if not result.HasField("part"):
            return result
        if self._partial is None or self._partial.step != result.step:
            self._partial = worker_pb2.StepResult()
        self._partial.MergeFrom(result)
        if result.part.index + 1 < result.part.count:
            return None
        whole, self._partial = self._partial, None
        return whole

    # ---- its end ----

    def oldest_step_age(self) -> float | None:
        flights = self.replica.flights
        return self._engine.clock.monotonic() - flights[0].sent_at if flights else None

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.end_reason = reason
            self.ended.set()
            self._out.put_nowait(None)

    async def watch(self) -> None:
        """End the link when the worker is silent or stuck."""
        limit = self._engine.settings.step_timeout
        while not self.ended.is_set():
            await asyncio.sleep(HEARTBEAT_S / 2)
            if self._engine.clock.monotonic() - self._heard_at > SILENCE_S:
                self.end(f"no heartbeat for {SILENCE_S:g} s")
            age = self.oldest_step_age()
            if age is not None and age > limit and self._busy_with in (types_pb2.ACTIVITY_NONE, types_pb2.ACTIVITY_UNSPECIFIED):
                self.end(f"a step is {age:.0f} s old")


def _configure_rank(rank: worker_pb2.RankResources, registry: ManagerRegistry) -> KVCacheConfig:
    layers = [(layer.layer, spec_of(layer.spec)) for layer in rank.layers]
    registry.check(layers)
    return configure(layers, rank.kv_bytes_available, rank.num_kv_blocks if rank.HasField("num_kv_blocks") else None)
