"""What a run asks for: how many requests, of what lengths, how many at one time. The four of `docs/performance.md` are built in."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from trivet_chassis.settings import nearest
from trivet_proto.errors import invalid


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: `typical` each, or log-normal around it as their median, within [shortest, longest]."""

    typical: int
    spread: float = 0.0  # standard deviation of the logarithm
    shortest: int = 1
    longest: int = 1 << 20

    def draw(self, source: random.Random) -> int:
        if not self.spread:
            return self.typical
        return min(self.longest, max(self.shortest, round(source.lognormvariate(log(self.typical), self.spread))))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    what: str
    concurrency: int  # of a closed loop
    requests: int
    shared_tokens: int  # at the front of every prompt of a run
    own_tokens: Lengths
    output_tokens: Lengths


WARM_UP = Workload("warm-up", "never counted", 4, 8, 0, Lengths(200), Lengths(16))

WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        Workload("W1", "one person talks", 1, 4, 0, Lengths(128), Lengths(128)),
        Workload("W2", "a small crowd", 16, 48, 0, Lengths(256), Lengths(64)),
        Workload("W3", "one system prompt for all", 8, 32, 1024, Lengths(32), Lengths(32)),
        Workload("W4", "long documents", 2, 4, 0, Lengths(3000), Lengths(32)),
        Workload("synthetic", "equal lengths", 8, 64, 0, Lengths(512), Lengths(128)),
        Workload("shared-prefix", "equal lengths behind a common beginning", 8, 64, 2048, Lengths(128), Lengths(128)),
        # Conversations as people share them: medians near 90 and 130 tokens with long tails, means a little above 200 each.
        Workload("sharegpt", "lengths as in shared conversations", 8, 64, 0, Lengths(90, 1.3, 4, 1024), Lengths(130, 0.95, 4, 1024)),
    )
}
FOUR = "W1,W2,W3,W4"


@dataclass(frozen=True, slots=True)
class Overrides:
    """What flags change in every workload of a run."""

    concurrency: int | None = None
    requests: int | None = None
    shared_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    def apply(self, workload: Workload) -> Workload:
        return replace(
            workload,
            concurrency=_given(self.concurrency, workload.concurrency),
            requests=_given(self.requests, workload.requests),
            shared_tokens=_given(self.shared_tokens, workload.shared_tokens),
            own_tokens=workload.own_tokens if self.input_tokens is None else replace(workload.own_tokens, typical=self.input_tokens),
            output_tokens=workload.output_tokens
            if self.output_tokens is None
            else replace(workload.output_tokens, typical=self.output_tokens),
        )


def chosen_workloads(names: str, overrides: Overrides) -> Sequence[Workload]:
    """By their names, separated by commas. Raises `TrivetError` for one that is not known."""
    for name in names.split(","):
        if name not in WORKLOADS:
            raise invalid(f"--workload {name} is not known{nearest(name, list(WORKLOADS))}: there are {', '.join(WORKLOADS)}")
    return [overrides.apply(WORKLOADS[name]) for name in names.split(",")]


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
