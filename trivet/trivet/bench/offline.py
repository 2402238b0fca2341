"""Measure the engine in one process, without HTTP and without sockets: what `LLM(inprocess=True)` gives.

  trivet bench offline                            the four workloads
  trivet bench offline -- MODEL --dtype float32   the same with flags of `trivet serve`
  trivet bench serve --seed 1 --json suite.json; trivet bench offline --seed 1 --against suite.json
                                                  how much of it the suite keeps: suite ÷ in process

Prompts are those of `trivet bench serve` with the same seed. loop: CPU milliseconds for each generated token that are not the model's:
the frontend, the scheduler, and the worker's link. W1 to W4 as in `trivet bench serve --help`.
"""

import argparse
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trivet_proto.errors import invalid

from trivet.bench.load.workloads import FOUR, WARM_UP, Overrides, Workload, chosen_workloads
from trivet.bench.own_engine import Turn, own_engine, take_turn
from trivet.bench.report import check_outputs, number, progress_bar, show_table, write_json

RATES = ("output_tokens_per_s", "total_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians of one workload's runs."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    loop_cpu_ms_per_token: float
    cpu_ms_per_token: float
    cached_tokens: float

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Rates":
        return cls(
            output_tokens_per_s=median(turn.output_tokens / turn.seconds for turn in turns),
            total_tokens_per_s=median((turn.output_tokens + turn.prompt_tokens) / turn.seconds for turn in turns),
            loop_cpu_ms_per_token=median(1e3 * turn.loop_cpu_seconds / turn.output_tokens for turn in turns),
            cpu_ms_per_token=median(1e3 * turn.cpu_seconds / turn.output_tokens for turn in turns),
            cached_tokens=median(turn.cached_tokens for turn in turns),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default=FOUR, metavar="NAMES", help="separated by commas")
    parser.add_argument("--runs", type=int, default=1, help="of each workload; tables show medians")
    parser.add_argument("--against", type=Path, metavar="FILE", help="JSON of a `trivet bench serve`, for the ratio suite ÷ in process")
    parser.add_argument("--seed", help="of the prompts; another one each time when not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(arguments: argparse.Namespace) -> int:
    if arguments.runs < 1:
        raise invalid(f"--runs {arguments.runs}: more than 0 is wanted")
    check_outputs(arguments.json, None)
    workloads = chosen_workloads(arguments.workload, Overrides())
    suite = {} if arguments.against is None else suite_rates(arguments.against)
    seed = arguments.seed or secrets.token_hex(4)
    turns = measure(workloads, arguments.runs, seed, arguments.passed_on)
    rates = {name: Rates.of(each) for name, each in turns.items()}
    show(rates, suite, f"medians of {arguments.runs} runs in one process; seed {seed}")
    content = {
        "seed": seed,
        "flags": arguments.passed_on,
        "workloads": [asdict(workload) for workload in workloads],
        "runs": [{"workload": name, **asdict(turn)} for name, each in turns.items() for turn in each],
        "medians": [{"workload": name, **asdict(each)} for name, each in rates.items()],
        "ratios": [{"workload": name, **ratio} for name, each in rates.items() for ratio in ratios(each, suite.get(name, {}))],
    }
    write_json(arguments.json, "offline", content)
    return 0


def measure(workloads: Sequence[Workload], runs: int, seed: str, flags: Sequence[str]) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {workload.name: [] for workload in workloads}
    with progress_bar(runs * len(workloads)) as bar:
        bar.describe("starting")
        with own_engine(flags) as engine:
            bar.describe("warming up")
            take_turn(engine, WARM_UP, f"{seed} warm-up")
            for workload in workloads:
                for index in range(runs):
                    bar.describe(f"{workload.name} run {index + 1}")
                    turns[workload.name].append(take_turn(engine, workload, f"{seed} {workload.name} {index}"))
                    bar.advance()
    return turns


def suite_rates(file: Path) -> dict[str, dict[str, Mapping[str, Any]]]:
    """By workload and server. Raises `TrivetError` for a file that `trivet bench serve` did not write."""
    try:
        content = json.loads(file.read_text())
        found: dict[str, dict[str, Mapping[str, Any]]] = {}
        for each in content["medians"]:
            found.setdefault(each["workload"], {})[each["server"]] = {rate: float(each["figures"][rate]) for rate in RATES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(f"--against {file}: the JSON of a `trivet bench serve` is wanted ({type(error).__name__}: {error})") from None
    return found


def ratios(rates: Rates, suite: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each server in the file: below 1 is what it costs to be served."""
    return [{"server": server} | {rate: figures[rate] / getattr(rates, rate) for rate in RATES} for server, figures in suite.items()]


def show(rates: Mapping[str, Rates], suite: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str) -> None:
    show_table(
        title,
        ["workload", "out/s", "total/s", "loop, CPU ms/token", "all, CPU ms/token", "cached"],
        [
            [
                name,
                number(each.output_tokens_per_s),
                number(each.total_tokens_per_s, 0),
                number(each.loop_cpu_ms_per_token, 2),
                number(each.cpu_ms_per_token, 2),
                number(each.cached_tokens, 0),
            ]
            for name, each in rates.items()
        ],
    )
    if suite:
        rows = [
            [name, ratio["server"], *(number(ratio[rate], 3) for rate in RATES)]
            for name, each in rates.items()
            for ratio in ratios(each, suite.get(name, {}))
        ]
        show_table("suite ÷ in process", ["workload", "server", "out/s", "total/s"], rows)
