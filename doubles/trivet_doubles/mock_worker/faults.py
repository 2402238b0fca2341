"""Faults on cue: which of a mock worker's steps fail, stall or kill it.

Steps are counted over the worker's life, from 1, whatever epoch they come in. What is decided here is carried out elsewhere.
"""

from collections.abc import Collection
from dataclasses import dataclass

from trivet_proto.errors import ErrorKind, TrivetError, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and when; nothing by default."""

    fail_step: Collection[int] = ()
    fail_every: int = 0
    out_of_memory_above: int = 0  # tokens in a step; 0: never
    non_finite_step: Collection[int] = ()  # the step's first row has the flag
    stall_step: Collection[int] = ()
    stall_for: float = 5.0  # seconds
    silent: bool = False  # a stalled worker sends no heartbeats either
    die_step: int = 0

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for cues that can never come."""
        for name in ("fail_step", "non_finite_step", "stall_step"):
            if any(step < 1 for step in getattr(self, name)):
                raise invalid(f"{name}: steps are counted from 1", name)
        if self.silent and not self.stall_step:
            raise invalid("silent: it is said of a stall, so stall_step is needed too", "silent")

    def failure_of(self, ordinal: int, num_tokens: int) -> TrivetError | None:
        """What this step fails with."""
        if self.out_of_memory_above and num_tokens > self.out_of_memory_above:
            return TrivetError(
                ErrorKind.OUT_OF_MEMORY, f"a step of {num_tokens} tokens does not fit (out_of_memory_above {self.out_of_memory_above})"
            )
        if ordinal in self.fail_step or (self.fail_every and ordinal % self.fail_every == 0):
            return TrivetError(ErrorKind.INTERNAL, f"step {ordinal} of this worker's life fails on cue", retryable=True)
        return None

    def stalls(self, ordinal: int) -> bool:
        return ordinal in self.stall_step

    def dies(self, ordinal: int) -> bool:
        return ordinal == self.die_step
