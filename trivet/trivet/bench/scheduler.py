"""Measure what scheduling takes: a scheduler in a process of its own between doubles, and its core alone.

  trivet bench scheduler --requests 1,16,64,256
  trivet bench scheduler --only core               `schedule` and `update`, without links or a worker

Service: so many requests decode at once, between mock workers that take no time and a frontend that only counts; CPU is of the scheduler
over the steps that were answered. Where `worker CPU` (the busiest one's) comes near a whole core, the mock worker was the limit. Core:
medians and 99th percentiles of a step in milliseconds, the last case with as many waiting as may.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trivet_proto.errors import invalid

from trivet.bench.flags import numbers, words
from trivet.bench.report import check_outputs, draw, progress_bar, show_table, write_json
from trivet.bench.services.core_step import CASES, Timing, measure, milliseconds
from trivet.bench.services.scheduler_load import SchedulerFigures, SchedulerOrder, measure_all
from trivet.bench.told_to_end import run_until_told

PARTS = ("service", "core")
SERVICE_COLUMNS = ("requests", "steps/s", "tokens/s", "CPU ms/step", "CPU µs/token", "scheduler CPU", "worker CPU")
CORE_COLUMNS = ("running", "waiting", "schedule p50", "update p50", "both p50", "both p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=words, default=list(PARTS), metavar="NAMES", help=" and ".join(PARTS))
    parser.add_argument("--requests", type=numbers, default=[1, 16, 64, 256], help="at one time, several separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="mock workers")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for so long each")
    parser.add_argument("--steps", type=int, default=400, help="of the core, for each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    for part in arguments.only:
        if part not in PARTS:
            raise invalid(f"--only {part} is not known: there are {', '.join(PARTS)}")
    order = SchedulerOrder(arguments.requests, arguments.workers, arguments.prompt, arguments.tokens, arguments.seconds)
    for name in ("workers", "prompt", "tokens", "seconds", "steps"):
        if getattr(arguments, name) <= 0:
            raise invalid(f"--{name} {getattr(arguments, name)}: more than 0 is wanted")
    check_outputs(arguments.json, arguments.plot)
    service: list[SchedulerFigures] = []
    core: list[tuple[int, int, Timing]] = []
    if "service" in arguments.only:
        # A socket's path has room for about 100 characters.
        with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
            service = run_until_told(measure_all(order, Path(folder)))
        title = f"one scheduler, {order.workers} mock workers, prompts of {order.prompt} tokens; CPU of one core"
        show_table(title, SERVICE_COLUMNS, [figures.row() for figures in service])
    if "core" in arguments.only:
        with progress_bar(len(CASES)) as bar:
            for running, waiting in CASES:
                bar.describe(f"{running} running, {waiting} waiting")
                core.append((running, waiting, measure(running, waiting, arguments.steps)))
                bar.advance()
        show_table("the scheduler's core, ms a step", CORE_COLUMNS, [_row(*each) for each in core])
    content: dict[str, Any] = {
        "service": [asdict(figures) for figures in service],
        "core": [{"running": running, "waiting": waiting, **_figures(timing)} for running, waiting, timing in core],
    }
    write_json(arguments.json, "scheduler", content)
    draw("scheduler", content, arguments.plot)
    return 0


def _figures(timing: Timing) -> dict[str, float]:
    both, worst = milliseconds(timing.both)
    return {
        "schedule_p50_ms": milliseconds(timing.schedule)[0],
        "update_p50_ms": milliseconds(timing.update)[0],
        "both_p50_ms": both,
        "both_p99_ms": worst,
    }


def _row(running: int, waiting: int, timing: Timing) -> list[str]:
    return [str(running), str(waiting), *(f"{value:.3f}" for value in _figures(timing).values())]
