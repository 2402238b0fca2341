"""When requests of an open loop arrive: at a rate, whatever the server does with them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` requests a second on average: bursts of `burst` at one moment, with Poisson's gaps between them; 1 is Poisson itself."""

    rate: float
    burst: int = 1

    def times(self, count: int, seed: str) -> Sequence[float]:
        """Seconds from the start, ascending; the first is 0."""
        source, now = random.Random(f"{seed} arrivals"), 0.0
        times: list[float] = []
        while len(times) < count:
            times += [now] * min(self.burst, count - len(times))
            now += source.expovariate(self.rate / self.burst)
        return times
