"""Measure what this machine can do at most, and from it the bounds of the workloads for a model.

  trivet bench limits                    the embedded default model
  trivet bench limits --model FOLDER

Reads by one thread and by all, out of the second cache, the third and memory; operations out of registers or tiles for float32, bfloat16
and int8 (for bfloat16 and int8 the quicker of their own and wider instructions bounds a model); how long a team of threads takes to meet.
"oneDNN" is what torch's own bfloat16 products reach on the model's layers, their weights packed: the bound of a server built on those.
The instruction set is the worker's (TRIVET_CPU_ISA lowers it). Each figure is the best of many short rounds.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trivet_chassis.cores import check_threads, usable_cores
from trivet_chassis.settings import check_native_variables
from trivet_kernels.cpu.library import NotBuilt, instruction_set
from trivet_kernels.cpu.limits import MIB, Effort, LimitFormat, meeting_seconds, product_rate, read_rate
from trivet_kernels.cpu.torch_products import torch_product_rate
from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet.bench.load.workloads import FOUR, Overrides, chosen_workloads
from trivet.bench.machine.bounds import FORMATS, LIBRARY, Bound, Limits, bound
from trivet.bench.machine.caches import cache_bytes
from trivet.bench.machine.model_dimensions import ModelDimensions, read_dimensions
from trivet.bench.report import check_outputs, draw, number, progress_bar, show_table, write_json
from trivet.bench.told_to_end import interruptible

KINDS = {"float32": LimitFormat.FLOAT32, "bfloat16": LimitFormat.BFLOAT16, "int8": LimitFormat.INT8}
MOST_MEMORY = 1 << 30
"""Bytes that are read to measure memory, where the caches would have more asked."""


@dataclass(frozen=True, slots=True)
class Read:
    level: str
    threads: int
    bytes_in_all: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Products:
    format: str
    threads: int
    gops_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="PATH", help="folder or GGUF file; the embedded default")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="as many as cores")
    parser.add_argument("--workload", default=FOUR, metavar="NAMES", help="whose bounds, separated by commas")
    parser.add_argument("--rounds", type=int, default=100, help="of which the best counts")
    parser.add_argument("--round-time", type=float, default=0.003, help="seconds of a round, about")
    parser.add_argument("--memory", type=int, metavar="MIB", help="read to measure memory; twice the last cache, 1024 at most")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    check_native_variables(os.environ)
    for name in ("threads", "rounds", "round_time", "memory"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise invalid(f"--{name.replace('_', '-')} {value}: more than 0 is wanted")
    check_threads(arguments.threads, "--threads")
    check_outputs(arguments.json, arguments.plot)
    workloads, model = chosen_workloads(arguments.workload, Overrides()), read_dimensions(arguments.model)
    reads, products, meeting = measure(model, arguments.threads, Effort(arguments.rounds, arguments.round_time), arguments.memory)
    limits = limits_of(arguments.threads, reads, products)
    forms = [form for form in FORMATS if limits.operations.keys() >= set(form.multiplied_as)]
    bounds = [bound(workload, model, form, limits) for form in forms for workload in workloads]
    show(arguments.threads, reads, products, meeting, bounds, model.name)
    content: dict[str, Any] = {
        "instruction_set": instruction_set(),
        "threads": arguments.threads,
        "reads": [asdict(each) for each in reads],
        "products": [asdict(each) for each in products],
        "meeting_s": meeting,
        "model": asdict(model),
        "bounds": [asdict(each) for each in bounds],
    }
    write_json(arguments.json, "limits", content)
    draw("limits", content, arguments.plot)
    return 0


def measure(model: ModelDimensions, threads: int, effort: Effort, memory_mib: int | None) -> tuple[list[Read], list[Products], float]:
    """Raises `TrivetError` where the native operators are not built."""
    second, third = cache_bytes()
    memory = memory_mib * MIB if memory_mib is not None else min(MOST_MEMORY, max(256 * MIB, 2 * third))
    teams = sorted({1, threads})
    # Half of a second cache for each thread, half of the third for all.
    levels: Mapping[str, Callable[[int], int]] = {
        "L2": lambda team: team * second // 2,
        "L3": lambda _: min(third // 2, memory // 4),
        "memory": lambda _: memory,
    }
    try:
        with progress_bar(len(teams) * (len(levels) + len(KINDS) + 1) + 1) as bar:
            reads, products = [], []
            for team in teams:
                for level, size in levels.items():
                    bar.describe(f"reading {level}, {team} threads")
                    each = size(team) // team
                    reads.append(Read(level, team, each * team, interruptible(partial(read_rate, team, each, effort)) / 1e9))
                    bar.advance()
                for name, kind in KINDS.items():
                    bar.describe(f"multiplying {name}, {team} threads")
                    products.append(Products(name, team, interruptible(partial(product_rate, team, kind, effort)) / 1e9))
                    bar.advance()
                bar.describe(f"multiplying by oneDNN, {team} threads")
                library = torch_product_rate(layer_shapes(model, memory), team, max(1, effort.rounds // 10))
                if library is not None:
                    products.append(Products(LIBRARY, team, library / 1e9))
                bar.advance()
            meeting = interruptible(partial(meeting_seconds, threads, effort))
    except (NotBuilt, MemoryError) as reason:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, str(reason)) from reason
    return reads, products, meeting


def layer_shapes(model: ModelDimensions, most_bytes: int) -> list[tuple[int, int]]:
    """Of the weights of all layers, or of as many as have so many bytes in bfloat16; of one layer at least."""
    layer = [shape for name, shape in model.products.items() if name != "head"]
    layers = most_bytes // (2 * sum(out * into for out, into in layer))
    return layer * max(1, min(model.layers, layers))


def limits_of(threads: int, reads: list[Read], products: list[Products]) -> Limits:
    """Of all threads together, out of memory."""
    return Limits(
        read=1e9 * max(each.gb_per_s for each in reads if each.level == "memory" and each.threads == threads),
        operations={each.format: 1e9 * each.gops_per_s for each in products if each.threads == threads},
    )


def show(threads: int, reads: list[Read], products: list[Products], meeting: float, bounds: list[Bound], model: str) -> None:
    show_table(
        "reads",
        ["out of", "threads", "MiB", "GB/s"],
        [[each.level, str(each.threads), number(each.bytes_in_all / MIB), number(each.gb_per_s)] for each in reads],
    )
    show_table(
        f"products, {instruction_set()}",
        ["format", "threads", "Gop/s"],
        [[each.format, str(each.threads), number(each.gops_per_s, 0)] for each in products],
    )
    print(f"a team of {threads} meets in {1e6 * meeting:.2f} µs\n")
    show_table(
        f"bounds for {model}",
        ["format", "workload", "out/s", "total/s", "prompts s", "decode step ms"],
        [
            [
                each.format,
                each.workload,
                number(each.output_tokens_per_s),
                number(each.total_tokens_per_s, 0),
                number(each.prompt_seconds, 2),
                number(1e3 * each.step_seconds, 2),
            ]
            for each in bounds
        ],
    )
