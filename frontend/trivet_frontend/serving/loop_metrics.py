"""A counter and a histogram for what is counted with every token.

The event loop alone counts and is scraped, so nothing is locked: prometheus_client's own take a lock for each number, which was a tenth of
what a streamed token takes here. They are registered, named and shown as those are. Each has one series.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopCounter(Collector):
    """Counts up."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._created = time.time()
        self._value = 0.0
        registry.register(self)

    def inc(self, amount: float) -> None:
        self._value += amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], self._value, created=self._created)
        yield family


class LoopHistogram(Collector):
    """How many values were at most so large, for each of rising bounds."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = bounds
        self._created = time.time()
        # Values of each bucket alone, and those beyond the last bound.
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[*self._labels])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]
        family.add_metric([*self._labels.values()], buckets, self._sum)
        family.add_sample(f"{self._name}_created", dict(self._labels), self._created)
        yield family
