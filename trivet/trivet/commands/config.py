"""`trivet config`: what `trivet serve` with the same flags would use: each process, each setting, and where each value comes from."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trivet.launch.planning import plan_launch
from trivet.launch.settings import load_serve_settings

RUN_DIRECTORY = Path("/RUN")
"""Stands for the private folder that a launch makes for its sockets."""


def run(argv: Sequence[str]) -> int:
    """Print the settings; starts nothing."""
    settings = load_serve_settings(argv, os.environ, prog="trivet config")
    plan = plan_launch(settings, os.environ, RUN_DIRECTORY, log_format=settings.value.log_format)
    print(f"# trivet serve\n{settings.loaded.describe()}")
    for process in plan.processes:
        print(f"\n# {process.name}: {shlex.join(process.command)}\n{process.description}")
    print(f"\n# {RUN_DIRECTORY} stands for the private folder of each launch.")
    return 0
