"""Block pool and scheduler under random fire: 10 000 steps by default, 40 000 others in `make test-long`, as many as one likes in
`make fire STEPS=500000`, which sets `TRIVET_FIRE_STEPS`.

The steps are cut in batches, each with a seed of its own: a batch that fails is run again by its number, and no batch grows slow.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test
from pool_machine import BlockPoolMachine
from scheduler_machine import SchedulerMachine

STEPS = int(os.environ.get("TRIVET_FIRE_STEPS", "10000"))
FIRST_BATCH = int(os.environ.get("TRIVET_FIRE_BATCH", "0"))
POOL_STEPS = STEPS // 5
PROMISES = [
    (BlockPoolMachine, POOL_STEPS, 0),
    (SchedulerMachine, STEPS - POOL_STEPS, 0),
    pytest.param(SchedulerMachine, 40_000, 100, marks=pytest.mark.long),
]
"""A machine, how many steps of it, and the number of the first batch."""
EXAMPLES, STEPS_EACH = 40, 50
WATCHING = "TRIVET_FIRE_STEPS" in os.environ

BATCH = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS_EACH,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Tally:
    """Rules that were run."""

    steps: int = 0


def counted(machine: type[RuleBasedStateMachine], tally: Tally) -> type[RuleBasedStateMachine]:
    class Counted(machine):  # type: ignore[valid-type, misc]
        has_begun = False

        @invariant()
        def count(self) -> None:
            tally.steps += self.has_begun
            self.has_begun = True

    return Counted


def batches(machine: type[RuleBasedStateMachine], steps: int, first: int) -> Iterator[tuple[int, Tally]]:
    """Run batches until so many steps are done."""
    tally, batch = Tally(), first
    while tally.steps < steps:
        run_state_machine_as_test(seed(batch)(counted(machine, tally)), settings=BATCH)
        yield batch, tally
        batch += 1


@pytest.mark.timeout(max(900, STEPS // 20))
@pytest.mark.parametrize(("machine", "steps", "first"), PROMISES)
def test_random_fire_breaks_no_promise(machine: type[RuleBasedStateMachine], steps: int, first: int) -> None:
    first += FIRST_BATCH
    done, last = 0, first - 1
    try:
        for batch, tally in batches(machine, steps, first):
            done, last = tally.steps, batch
            if WATCHING:
                print(f"\r{machine.__name__}: {done} of {steps} steps", end="", file=sys.stderr, flush=True)
    except BaseException:
        print(f"\n{machine.__name__}: batch {last + 1} failed; TRIVET_FIRE_BATCH={last + 1} begins with it", file=sys.stderr)
        raise
    assert done >= steps
