"""Block pool and scheduler under random fire: 20 000 steps by default, as many as `TRIVET_FIRE_STEPS` says (`make fire STEPS=500000`).

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

STEPS = int(os.environ.get("TRIVET_FIRE_STEPS", "20000"))
FIRST_BATCH = int(os.environ.get("TRIVET_FIRE_BATCH", "0"))
POOL_STEPS = STEPS // 5
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


def batches(machine: type[RuleBasedStateMachine], steps: int) -> Iterator[tuple[int, Tally]]:
    """Run batches until so many steps are done."""
    tally, batch = Tally(), FIRST_BATCH
    while tally.steps < steps:
        run_state_machine_as_test(seed(batch)(counted(machine, tally)), settings=BATCH)
        yield batch, tally
        batch += 1


@pytest.mark.timeout(max(900, STEPS // 20))
@pytest.mark.parametrize(("machine", "steps"), [(BlockPoolMachine, POOL_STEPS), (SchedulerMachine, STEPS - POOL_STEPS)])
def test_random_fire_breaks_no_promise(machine: type[RuleBasedStateMachine], steps: int) -> None:
    done, last = 0, FIRST_BATCH - 1
    try:
        for batch, tally in batches(machine, steps):
            done, last = tally.steps, batch
            if WATCHING:
                print(f"\r{machine.__name__}: {done} of {steps} steps", end="", file=sys.stderr, flush=True)
    except BaseException:
        print(f"\n{machine.__name__}: batch {last + 1} failed; TRIVET_FIRE_BATCH={last + 1} begins with it", file=sys.stderr)
        raise
    assert done >= steps
