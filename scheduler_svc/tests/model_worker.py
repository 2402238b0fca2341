"""A worker without a model: tokens are a function of what came before, so every schedule must give the same output."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from trivet_chassis.clock import ManualClock
from trivet_proto.v1 import types_pb2
from trivet_scheduler.core import CoreSettings, Scheduler
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.kv.hashing import HashKeys
from trivet_scheduler.kv.memory import configure
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.kv.specs import FullAttentionSpec
from trivet_scheduler.plan import StepOutcome, StepPlan, StepStatus
from trivet_scheduler.replica import Replica, ReplicaLimits
from trivet_scheduler.request import Request, RequestSpec, Status

BLOCK = 4
VOCABULARY = 1000


def next_token(ids: Sequence[int], seed: int) -> int:
    return hash((tuple(ids), seed)) % VOCABULARY


def expected_output(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, seed))
    return ids[len(prompt) :]


@dataclass
class Held:
    ids: list[int]
    blocks: list[int]
    seed: int
    samples: bool


@dataclass
class ModelWorker:
    """Keeps the content of every block, so that reading a block that was not written for this prefix is caught."""

    held: dict[int, Held] = field(default_factory=dict)
    content: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # block → the prefix that each of its slots was written for

    def run(self, plan: StepPlan, *, fail: bool = False) -> StepOutcome:
        for handle in plan.finished_handles:
            self.held.pop(handle, None)
        rows = []
        for work in plan.new:
            sampling = work.request.spec.sampling
            samples = not (sampling.HasField("max_tokens") and sampling.max_tokens == 0)
            self.held[work.handle] = Held(work.token_ids.tolist(), work.block_ids.tolist(), work.request.seed, samples)
            rows.append((work.handle, work.num_computed, work.num_scheduled))
        at = 0
        for handle, scheduled, computed, count in zip(
            plan.known_handles.tolist(),
            plan.known_scheduled.tolist(),
            plan.known_computed.tolist(),
            plan.new_block_counts.tolist(),
            strict=True,
        ):
            self.held[handle].blocks += plan.new_blocks[at : at + count].tolist()
            at += count
            rows.append((handle, computed, scheduled))
        if fail:
            return outcome(plan.number, StepStatus.FAILED, [], [], [])
        tokens, counts = [], []
        for handle, computed, scheduled in rows:
            held = self.held[handle]
            for position in range(computed, computed + scheduled):
                self._write(held, position)
            for position in range(computed + scheduled):
                self._read(held, position)
            done = computed + scheduled == len(held.ids) and held.samples
            if done:
                held.ids.append(next_token(held.ids, held.seed))
                tokens.append(held.ids[-1])
            counts.append(int(done))
        return outcome(plan.number, StepStatus.DONE, [handle for handle, _, _ in rows], counts, tokens)

    def _write(self, held: Held, position: int) -> None:
        assert position < len(held.ids), "a token that does not exist is run"
        slots = self.content.setdefault(held.blocks[position // BLOCK], [()] * BLOCK)
        slots[position % BLOCK] = tuple(held.ids[: position + 1])

    def _read(self, held: Held, position: int) -> None:
        slots = self.content[held.blocks[position // BLOCK]]
        assert slots[position % BLOCK] == tuple(held.ids[: position + 1]), "a block holds another prefix's keys and values"


def outcome(number: int, status: StepStatus, handles: list[int], counts: list[int], tokens: list[int]) -> StepOutcome:
    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return StepOutcome(number, status, ints(handles), ints(counts), ints(tokens), ints([]), None, [], np.zeros(0, dtype=np.uint8))


def make_scheduler(**settings: object) -> Scheduler:
    return Scheduler(CoreSettings(**{"watermark": 0.0, **settings}), ManualClock())  # type: ignore[arg-type]


def make_replica(num_blocks: int = 50, *, seqs: int = 16, tokens: int = 32, in_flight: int = 2, name: str = "replica") -> Replica:
    spec = FullAttentionSpec(block_size=BLOCK, kv_heads=1, head_size=8, dtype="float32")
    config = configure([("layer", spec)], spec.page_size_bytes * num_blocks, num_blocks)
    return Replica(name, KVCacheCoordinator(config, default_registry()), ReplicaLimits(seqs, tokens, 10_000, in_flight))


def make_spec(
    prompt: Sequence[int], max_tokens: int = 8, *, children: int = 1, deadline: float | None = None, **sampling: object
) -> RequestSpec:
    params = types_pb2.SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return RequestSpec(
        uid=bytes(16),
        request_id="",
        prompt=np.array(prompt, dtype=np.int32),
        sampling=params,
        keys=HashKeys(),
        num_children=children,
        stop_ids=frozenset(),
        min_tokens=0,
        read_prefix_cache=True,
        deadline=deadline,
    )


@dataclass
class Collected:
    """What the owner of the requests has seen."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    finishes: dict[Request, list[Status]] = field(default_factory=dict)
    cached: dict[Request, int] = field(default_factory=dict)

    def take(self, scheduler: Scheduler) -> None:
        for delta in scheduler.take_deltas():
            assert delta.request not in self.finishes, "something came after the finish"
            self.tokens.setdefault(delta.request, []).extend(delta.token_ids)
            if delta.cached_tokens is not None:
                assert delta.request not in self.cached, "cached tokens are reported once"
                self.cached[delta.request] = delta.cached_tokens
            if delta.finish is not None:
                self.finishes.setdefault(delta.request, []).append(delta.finish)


def run_until_idle(
    scheduler: Scheduler, replica: Replica, worker: ModelWorker, collected: Collected, *, most: int = 5000
) -> list[StepPlan]:
    """Keep as many steps in flight as allowed until nothing is left to do."""
    waiting: list[StepPlan] = []
    plans = []
    for _ in range(most):
        plan = scheduler.schedule(replica)
        if plan is not None:
            waiting.append(plan)
            plans.append(plan)
            continue
        if not waiting:
            break
        scheduler.update(replica, worker.run(waiting.pop(0)))
        collected.take(scheduler)
    else:
        raise AssertionError("it never came to rest")
    collected.take(scheduler)
    return plans
