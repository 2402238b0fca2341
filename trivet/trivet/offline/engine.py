"""A running scheduler with its worker, as the frontend of an `LLM` reaches it, wherever they run."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from trivet_chassis.rpc import Dial
from trivet_proto.v1 import worker_pb2


@dataclass(slots=True)
class StepTimes:
    """Where the worker's steps since the start spent their time, in seconds of the clock."""

    steps: int = 0
    link: float = 0.0  # from when it could have begun to when it was there to begin
    input: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    def take(self, result: worker_pb2.StepResult) -> None:
        timing = result.timing
        if not timing.total_us:
            return  # nothing was computed: news of finished requests, or a step that failed
        self.steps += 1
        self.link += timing.link_us / 1e6
        self.input += timing.input_us / 1e6
        self.forward += timing.forward_us / 1e6
        self.sample += timing.sample_us / 1e6

    def since(self, before: "StepTimes") -> "StepTimes":
        return StepTimes(
            self.steps - before.steps,
            self.link - before.link,
            self.input - before.input,
            self.forward - before.forward,
            self.sample - before.sample,
        )


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """`dial` reaches the scheduler at `address`. `life` ends only by an exception: what the engine died of. `step_times` are those of a
    worker in this process, None where it is in another."""

    address: str
    dial: Dial
    life: "asyncio.Task[NoReturn]"
    step_times: StepTimes | None = None


OpenEngine: TypeAlias = Callable[[], AbstractAsyncContextManager[RunningEngine]]
"""Starts an engine, which is ready inside the block and gone after it. Raises `TrivetError` where it cannot start."""
