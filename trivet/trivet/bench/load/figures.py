"""From answers to figures: rates, percentiles, and how much of it met what was promised (goodput)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from trivet_proto.errors import invalid

from trivet.bench.load.stream import Answer, Failure

SERIES = ("ttft", "itl", "tpot", "e2e")
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Objective:
    """What each request must keep to be good: milliseconds by name; `itl` is the longest gap of the request."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """`ttft=500,tpot=50`. Raises `TrivetError`."""
        limits = {}
        for part in text.split(","):
            name, found, value = part.partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                found = ""
            if not found or name not in SERIES or not limits[name] > 0:
                raise invalid(f"--slo {text}: milliseconds by name are wanted, such as ttft=500,tpot=50; names are {', '.join(SERIES)}")
        return cls(limits)

    def is_met(self, answer: Answer) -> bool:
        seconds = {
            "ttft": answer.ttft,
            "itl": max(answer.gaps, default=0.0),
            "tpot": answer.tpot or 0.0,
            "e2e": answer.end_to_end,
        }
        return all(1e3 * seconds[name] <= limit for name, limit in self.limits_ms.items())


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one workload against one server. Times in milliseconds by percentile; a figure that has no meaning here is None."""

    seconds: float
    answered: int
    failed: int
    failures: tuple[str, ...]  # some of their reasons
    requests_per_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    tokens_are_counted: bool  # by the server; otherwise output tokens are events, and prompt tokens are not known
    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_event: float | None
    ttft_ms: Mapping[str, float | None]
    itl_ms: Mapping[str, float | None]
    tpot_ms: Mapping[str, float | None]
    e2e_ms: Mapping[str, float | None]
    goodput_share: float | None  # of all requests
    goodput_per_s: float | None
    client_core_share: float  # of one core that the measuring took

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(results: Sequence[Answer | Failure], seconds: float, core_share: float, objective: Objective | None) -> Figures:
    answers = [each for each in results if isinstance(each, Answer)]
    failures = [each.reason for each in results if isinstance(each, Failure)]
    output, prompt = sum(each.output_tokens for each in answers), sum(each.prompt_tokens or 0 for each in answers)
    events = sum(1 + len(each.gaps) for each in answers)
    good = None if objective is None else sum(objective.is_met(each) for each in answers)
    return Figures(
        seconds=seconds,
        answered=len(answers),
        failed=len(failures),
        failures=tuple(sorted(set(failures))[:5]),
        requests_per_s=len(answers) / seconds,
        output_tokens=output,
        prompt_tokens=prompt,
        cached_tokens=sum(each.cached_tokens for each in answers),
        tokens_are_counted=all(each.counted for each in answers),
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + prompt) / seconds,
        tokens_per_event=output / events if events else None,
        ttft_ms=percentiles([each.ttft for each in answers]),
        itl_ms=percentiles([gap for each in answers for gap in each.gaps]),
        tpot_ms=percentiles([each.tpot for each in answers if each.tpot is not None]),
        e2e_ms=percentiles([each.end_to_end for each in answers]),
        goodput_share=None if good is None else good / max(1, len(results)),
        goodput_per_s=None if good is None else good / seconds,
        client_core_share=core_share,
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds, between the two nearest ranks."""
    ordered = sorted(seconds)
    return {name: 1e3 * _at(ordered, share) if ordered else None for name, share in SHARES.items()}


def _at(ordered: Sequence[float], share: float) -> float:
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def medians(runs: Sequence[Figures]) -> dict[str, Any]:
    """Of each figure over the runs, failures added up."""
    merged: dict[str, Any] = {}
    for each in fields(Figures):
        values = [getattr(run, each.name) for run in runs]
        if isinstance(values[0], Mapping):
            merged[each.name] = {name: _median([value[name] for value in values]) for name in values[0]}
        elif each.name == "failures":
            merged[each.name] = sorted({reason for value in values for reason in value})[:5]
        elif each.name == "tokens_are_counted":
            merged[each.name] = all(values)
        elif each.name == "failed":
            merged[each.name] = sum(values)
        else:
            merged[each.name] = _median(values)
    return merged


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
