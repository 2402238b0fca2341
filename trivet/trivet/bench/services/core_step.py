"""What the scheduler's core takes for one step: `schedule` and `update` alone, in steady decode, without links or a worker.

The time is to grow with what a step schedules, not with all that there is: one case has as many waiting as may.
"""

import gc
import statistics
import time
from dataclasses import dataclass

import numpy as np
from trivet_chassis.clock import SystemClock
from trivet_proto.v1 import types_pb2
from trivet_scheduler.core import CoreSettings, Scheduler
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.kv.hashing import HashKeys
from trivet_scheduler.kv.memory import configure
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.kv.specs import FullAttentionSpec
from trivet_scheduler.plan import Flight, StepOutcome, StepStatus
from trivet_scheduler.replica import Replica, ReplicaLimits
from trivet_scheduler.request import RequestSpec

BLOCK = 16
PROMPT = 128
CONTEXT = 100_000
CASES = ((1, 0), (16, 0), (64, 0), (256, 0), (256, 3800))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, by step."""

    schedule: list[float]
    update: list[float]

    @property
    def both(self) -> list[float]:
        return [schedule + update for schedule, update in zip(self.schedule, self.update, strict=True)]


def make_replica(running: int, steps: int) -> Replica:
    blocks = running * ((PROMPT + steps) // BLOCK + 3) + 2
    spec = FullAttentionSpec(block_size=BLOCK, kv_heads=3, head_size=64, dtype="bfloat16")
    config = configure([("layer", spec)], spec.page_size_bytes * blocks, blocks)
    return Replica("replica", KVCacheCoordinator(config, default_registry()), ReplicaLimits(running, 1 << 20, CONTEXT, 2))


def make_spec(index: int) -> RequestSpec:
    """Every prompt is another, so that none is found in the cache."""
    return RequestSpec(
        uid=index.to_bytes(16, "little"),
        request_id="",
        prompt=np.full(PROMPT, index, dtype=np.int32),
        sampling=types_pb2.SamplingParams(max_tokens=CONTEXT - PROMPT),
        keys=HashKeys(),
        num_children=1,
        stop_ids=frozenset({2}),
        min_tokens=0,
        read_prefix_cache=True,
    )


def answer(flight: Flight) -> StepOutcome:
    counts = flight.samples.astype(np.int32).tolist()
    return StepOutcome(
        number=flight.number,
        status=StepStatus.DONE,
        handles=flight.handles,
        token_counts=counts,
        token_ids=[7] * sum(counts),
        logprob_rows=[],
        logprobs=None,
        prompt_logprobs=[],
        flags=b"",
    )


def measure(running: int, waiting: int, steps: int) -> Timing:
    """Decode with one step in flight while the next is scheduled, as a link does."""
    scheduler, replica = Scheduler(CoreSettings(watermark=0.0), SystemClock()), make_replica(running, steps)
    scheduler.attach(replica)
    for index in range(running + waiting):
        scheduler.add(make_spec(index), None, [index + 1], index, CONTEXT)
    for _ in range(2):
        assert scheduler.schedule(replica) is not None
    timing = Timing([], [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            outcome = answer(replica.flights[0])
            begun = time.perf_counter()
            scheduler.update(replica, outcome)
            updated = time.perf_counter()
            plan = scheduler.schedule(replica)
            timing.schedule.append(time.perf_counter() - updated)
            timing.update.append(updated - begun)
            assert plan is not None
            scheduler.take_deltas()
    finally:
        gc.enable()
    assert len(replica.running) == running
    return timing


def milliseconds(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(values) * 1000, float(np.percentile(values, 99)) * 1000
