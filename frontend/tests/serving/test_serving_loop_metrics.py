"""What counts without locks is shown as prometheus_client shows its own."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from trivet_frontend.serving.loop_metrics import LoopCounter, LoopHistogram

BOUNDS = (0.001, 0.5, 1.0, 20.0)
LABELS = {"model_name": 'a "model"'}


def shown(registry: CollectorRegistry) -> list[str]:
    """All lines but the times of creation, of which only the names."""
    lines = generate_latest(registry).decode().splitlines()
    return [line.rsplit(" ", 1)[0] if "_created{" in line else line for line in lines]


@given(amounts=st.lists(st.integers(0, 1000)))
def test_a_counter_is_shown_as_prometheus_shows_its_own(amounts: list[int]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = LoopCounter("vllm:tokens", "Tokens.", LABELS, registry=ours)
    reference = Counter("vllm:tokens", "Tokens.", [*LABELS], registry=theirs).labels(**LABELS)
    for amount in amounts:
        counter.inc(amount)
        reference.inc(amount)
    assert shown(ours) == shown(theirs)


@given(values=st.lists(st.sampled_from(BOUNDS) | st.floats(0.0, 100.0)))
def test_a_histogram_is_shown_as_prometheus_shows_its_own(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("vllm:gap_seconds", "Gaps.", LABELS, BOUNDS, registry=ours)
    reference = Histogram("vllm:gap_seconds", "Gaps.", [*LABELS], buckets=BOUNDS, registry=theirs).labels(**LABELS)
    for value in values:
        histogram.observe(value)
        reference.observe(value)
    assert shown(ours) == shown(theirs)
