"""Measure how long one batch takes in the engine of one process: equal prompts in length, all at once, again and again.

  trivet bench latency                                         1 prompt of 128 tokens, 128 out
  trivet bench latency --batch-size 16 --input-tokens 256 --output-tokens 64 --repeat 20
  trivet bench latency -- MODEL --dtype float32                flags of `trivet serve` come after --

Each repetition has prompts of its own, so that no prefix cache answers. A token's time is the whole divided by the tokens of one answer,
the prompt's computation included. A step's time is told by what it goes into, on the average: forward and sample compute, input prepares
them, link waits for the step, else is the rest of the time, with what frontend and scheduler do between two steps.
"""

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from trivet_proto.errors import invalid

from trivet.bench.load.figures import SHARES, percentiles
from trivet.bench.load.workloads import Lengths, Workload
from trivet.bench.own_engine import Turn, own_engine, take_turn
from trivet.bench.report import check_outputs, number, progress_bar, show_table, write_json
from trivet.offline.engine import StepTimes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1, help="prompts at once")
    parser.add_argument("--input-tokens", type=int, default=128, help="of each prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeat", type=int, default=10, help="times that count")
    parser.add_argument("--warm-up", type=int, default=2, help="times before them")
    parser.add_argument("--seed", help="of the prompts; another one each time when not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(arguments: argparse.Namespace) -> int:
    for name, least in (("batch_size", 1), ("input_tokens", 1), ("output_tokens", 1), ("repeat", 1), ("warm_up", 0)):
        if getattr(arguments, name) < least:
            raise invalid(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least {least} is wanted")
    check_outputs(arguments.json, None)
    size = arguments.batch_size
    workload = Workload("latency", "one batch", size, size, 0, Lengths(arguments.input_tokens), Lengths(arguments.output_tokens))
    seed = arguments.seed or secrets.token_hex(4)
    turns = measure(workload, arguments.warm_up, arguments.repeat, seed, arguments.passed_on)
    figures = summarize(turns, arguments.output_tokens)
    title = f"{size} × {arguments.input_tokens} in, {arguments.output_tokens} out, {arguments.repeat} times, ms; seed {seed}"
    show_table(
        title,
        ["", "least", *SHARES],
        [[name, *(number(value, 2) for value in values.values())] for name, values in figures.items()],
    )
    parts = parts_of_a_step(turns)
    if parts:
        whole, computing = sum(parts.values()), parts["forward"] + parts["sample"]
        show_table(
            f"a step, ms; not computing: {whole - computing:.2f} ms, {100 * (1 - computing / whole):.1f} %",
            ["", *parts],
            [["mean", *(number(value, 2) for value in parts.values())]],
        )
    asked = {name: getattr(arguments, name) for name in ("batch_size", "input_tokens", "output_tokens", "repeat", "warm_up")}
    content = {
        "seed": seed,
        "flags": arguments.passed_on,
        **asked,
        "seconds": [turn.seconds for turn in turns],
        "milliseconds": figures,
        "step_ms": parts,
    }
    write_json(arguments.json, "latency", content)
    return 0


def measure(workload: Workload, warm_up: int, repeat: int, seed: str, flags: Sequence[str]) -> list[Turn]:
    """The turns that count."""
    turns = []
    with progress_bar(warm_up + repeat) as bar:
        bar.describe("starting")
        with own_engine(flags) as engine:
            for index in range(warm_up + repeat):
                bar.describe("warming up" if index < warm_up else "measuring")
                turns.append(take_turn(engine, workload, f"{seed} {index}"))
                bar.advance()
    return turns[warm_up:]


def summarize(turns: Sequence[Turn], output_tokens: int) -> dict[str, dict[str, float | None]]:
    """Milliseconds of the whole batch and of each of its tokens: the least, and percentiles."""
    seconds = [turn.seconds for turn in turns]
    found = {"least": 1e3 * min(seconds)} | percentiles(seconds)
    return {"batch": found, "token": {name: None if value is None else value / output_tokens for name, value in found.items()}}


def parts_of_a_step(turns: Sequence[Turn]) -> dict[str, float]:
    """Milliseconds of an average step by what they go into, which add up to its time; nothing where the engine tells no times."""
    times = [turn.step_times for turn in turns if turn.step_times is not None and turn.step_times.steps]
    if len(times) < len(turns):
        return {}
    steps = sum(each.steps for each in times)
    names = [field.name for field in fields(StepTimes) if field.name != "steps"]
    parts = {name: 1e3 * sum(getattr(each, name) for each in times) / steps for name in names}
    whole = 1e3 * sum(turn.seconds for turn in turns) / steps
    return parts | {"else": whole - sum(parts.values())}
