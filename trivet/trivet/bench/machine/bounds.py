"""The bounds of workloads on this machine: no server that computes what is asked can be quicker.

Weights are read once a step, keys and values of every context once a step, at the measured rate of reads; products run at the measured
rate of the matrix instructions, attention's among them. Reading and computing overlap, so that a step takes the longer of the two. Prompts
are computed as if in one go, and what they share once. Everything else, from norms to HTTP, takes no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trivet.bench.load.workloads import Workload
from trivet.bench.machine.model_dimensions import ModelDimensions

LIBRARY: Final = "bfloat16 (oneDNN)"
"""Products as torch runs them, in the place of the instructions' own rate."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured, with all threads: bytes a second out of memory, operations a second by what is multiplied."""

    read: float
    operations: Mapping[str, float]  # float32, bfloat16, int8; LIBRARY where torch's own products were measured


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are kept, and what multiplies them; the KV cache has its own type."""

    name: str
    weight_bytes: float
    multiplied_as: tuple[str, ...]  # the quickest of these counts
    kv_bytes: int


FORMATS: Final = (
    Format("float32", 4.0, ("float32",), 4),
    Format("bfloat16", 2.0, ("bfloat16", "float32"), 2),
    Format(LIBRARY, 2.0, (LIBRARY,), 2),
    Format("int8", 1.0, ("int8", "bfloat16", "float32"), 2),
    Format("q8_0", 34 / 32, ("int8", "bfloat16", "float32"), 2),
    Format("q4_1", 20 / 32, ("int8", "bfloat16", "float32"), 2),
    Format("q4_0", 18 / 32, ("int8", "bfloat16", "float32"), 2),
)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of a whole run, of a decode step in its middle, and the rates that follow."""

    workload: str
    format: str
    seconds: float
    prompt_seconds: float
    step_seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def bound(workload: Workload, model: ModelDimensions, form: Format, limits: Limits) -> Bound:
    own, out, requests = workload.own_tokens.typical, workload.output_tokens.typical, workload.requests
    at_once = min(workload.concurrency, requests)
    rate = max(limits.operations[kind] for kind in form.multiplied_as)
    weights = form.weight_bytes * (model.layer_values + model.head_values)
    kv = form.kv_bytes * model.kv_values()

    # Token i of a prompt sees i + 1 tokens; products in the head are of each prompt's last token alone.
    tokens = workload.shared_tokens + requests * own
    seen = _sum_to(workload.shared_tokens) + requests * (_sum_to(workload.shared_tokens + own) - _sum_to(workload.shared_tokens))
    operations = 2 * (tokens * model.layer_values + requests * model.head_values) + model.attention_operations(1) * seen
    groups = -(-requests // at_once)
    prompts = max(operations / rate, groups * weights / limits.read)

    # A prompt's last token already gave the first token of the answer.
    steps = groups * (out - 1)
    context = workload.shared_tokens + own + out // 2
    step_bytes = weights + kv * (workload.shared_tokens + at_once * (context - workload.shared_tokens))
    step_operations = at_once * (2 * (model.layer_values + model.head_values) + model.attention_operations(context))
    step = max(step_bytes / limits.read, step_operations / rate)

    seconds = prompts + steps * step
    return Bound(
        workload=workload.name,
        format=form.name,
        seconds=seconds,
        prompt_seconds=prompts,
        step_seconds=step,
        output_tokens_per_s=requests * out / seconds,
        total_tokens_per_s=requests * (workload.shared_tokens + own + out) / seconds,
    )


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
