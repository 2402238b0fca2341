"""Which implementation runs here, and why the others do not."""

from collections.abc import Callable
from dataclasses import dataclass

from trivet_kernels import reference
from trivet_kernels.api import Operators


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation and its reason not to run; None when it can."""

    operators: Operators
    reason_against: Callable[[], str | None]


# Fastest first.
CANDIDATES: tuple[Candidate, ...] = (Candidate(reference, lambda: None),)


@dataclass(frozen=True, slots=True)
class Choice:
    operators: Operators
    rejected: tuple[tuple[str, str], ...]  # name, reason


def choose() -> Choice:
    """The fastest implementation that runs on this machine."""
    rejected: list[tuple[str, str]] = []
    for candidate in CANDIDATES:
        reason = candidate.reason_against()
        if reason is None:
            return Choice(candidate.operators, tuple(rejected))
        rejected.append((candidate.operators.name, reason))
    raise RuntimeError("the reference always runs")
