"""`trivet bench NAME`: measurements, a module each, loaded when asked for: some need torch, which the launcher never loads.

A module has `add_arguments(parser)`, its flags, and `run(arguments)`, which returns the exit code: 0 when everything was measured, 1 when
something failed on the way.
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Never, Protocol

from trivet_chassis.settings import nearest
from trivet_proto.errors import invalid


class Measurement(Protocol):
    """What the module of a subcommand has; its docstring is the help text."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Subcommand:
    summary: str
    module: str


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "offline": Subcommand("the engine in one process under the four workloads, and what the suite keeps of it", "trivet.bench.offline"),
    "latency": Subcommand("one batch of equal prompts in one process, again and again", "trivet.bench.latency"),
    "quality": Subcommand("what dtypes and quantisations cost: distributions against float32 on the same tokens", "trivet.bench.quality"),
    "serve": Subcommand("any OpenAI-compatible server, or a `trivet serve` of its own, under the four workloads", "trivet.bench.serve"),
    "limits": Subcommand("what this machine can do at most, and the bounds of the workloads that follow", "trivet.bench.limits"),
    "kernels": Subcommand("native products, attention and whole steps, beside what the machine can do", "trivet.bench.kernels"),
    "scheduler": Subcommand("what scheduling takes: the service between doubles, and its core alone", "trivet.bench.scheduler"),
    "frontend": Subcommand("what text and HTTP take: the service before a double of the scheduler", "trivet.bench.frontend"),
}

USAGE = """\
usage: trivet bench NAME [ARGUMENTS]

Measure servers, services, kernels and the machine. Run nothing else meanwhile.

names:
{names}

`trivet bench NAME --help` has the flags of each.
"""


class Parser(argparse.ArgumentParser):
    """Whose mistakes are one readable line."""

    def error(self, message: str) -> Never:
        raise invalid(f"{self.prog}: {message} ({self.prog} --help has all flags)")


def run(argv: Sequence[str]) -> int:
    """Find the measurement and run it; returns the exit code. Raises `TrivetError` for what the caller got wrong."""
    if not argv or argv[0] in ("--help", "-h"):
        print(USAGE.format(names="\n".join(f"  {name:<10} {each.summary}" for name, each in SUBCOMMANDS.items())), end="")
        return 0 if argv else 2
    subcommand = SUBCOMMANDS.get(argv[0])
    if subcommand is None:
        raise invalid(f"{argv[0]} is no measurement{nearest(argv[0], list(SUBCOMMANDS))} (trivet bench --help lists them)")
    # After -- come the flags of what is started, which are not ours to read.
    words = list(argv[1:])
    own, passed_on = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    module: Measurement = importlib.import_module(subcommand.module)
    parser = Parser(
        prog=f"trivet bench {argv[0]}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(own)
    arguments.passed_on = passed_on
    return module.run(arguments)
