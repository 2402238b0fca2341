"""Measure what text and HTTP take: a frontend in a process of its own, fed by a mock scheduler that takes no time.

  trivet bench frontend --concurrency 1,16,64

So many clients ask over a Unix socket, read the answer to its end and ask again, once streamed and once whole. CPU is of the frontend over
the tokens that it delivered. Where `mock CPU` comes near a whole core, the mock scheduler was the limit. Exit status 1 if an answer failed.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trivet_proto.errors import invalid

from trivet.bench.flags import numbers
from trivet.bench.report import check_outputs, draw, show_table, write_json
from trivet.bench.services.frontend_load import FrontendOrder, measure_all
from trivet.bench.told_to_end import run_until_told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64], help="clients at one time, several separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for so long each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    order = FrontendOrder(arguments.concurrency, arguments.tokens, arguments.seconds)
    for name in ("tokens", "seconds"):
        if getattr(arguments, name) <= 0:
            raise invalid(f"--{name} {getattr(arguments, name)}: more than 0 is wanted")
    check_outputs(arguments.json, arguments.plot)
    # A socket's path has room for about 100 characters.
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        figures = run_until_told(measure_all(order, Path(folder)))
    columns = ("clients", "answers", "requests/s", "tokens/s", "CPU µs/token", "frontend CPU", "mock CPU", "failed")
    show_table(f"one frontend, answers of {order.tokens} tokens; CPU of one core", columns, [each.row() for each in figures])
    content: dict[str, Any] = {"tokens": order.tokens, "frontend": [asdict(each) for each in figures]}
    write_json(arguments.json, "frontend", content)
    draw("frontend", content, arguments.plot)
    return 1 if any(each.failures for each in figures) else 0
