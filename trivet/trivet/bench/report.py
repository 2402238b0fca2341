"""How measurements are shown and kept: a table to read, a JSON file to compute with, a bar that tells how far they are."""

import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from trivet_chassis.metrics import software_version
from trivet_proto.errors import ErrorKind, TrivetError, invalid

SCHEMA = 1
"""Of the JSON files; grows when a name in them changes its meaning."""


class Bar:
    """Drawn when something ends, and at no other time: a thread that redraws takes from what is measured."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def describe(self, what: str) -> None:
        self._progress.update(self._task, description=what)
        self._progress.refresh()

    def advance(self) -> None:
        self._progress.update(self._task, advance=1)

    def refresh(self) -> None:
        self._progress.refresh()


@contextmanager
def progress_bar(total: int) -> Iterator[Bar]:
    """On a terminal; nowhere else."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        yield Bar(progress, total)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as Markdown has them, as wide as it is."""
    table = Table(box=MARKDOWN)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide = Console(width=400, file=StringIO(), force_terminal=False)
    with wide.capture() as captured:
        wide.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
    print("\n".join([title, "", *lines, ""]), flush=True)


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Before anything is measured. Raises `TrivetError` where a file could not be written or a plot not be drawn."""
    check_can_write("--json", json_file)
    check_can_write("--plot", plot_file)
    if plot_file is None:
        return
    if plot_file.suffix != ".png":
        raise invalid(f"--plot {plot_file}: plots are PNG files; give it a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise invalid("--plot needs matplotlib, which is not installed: pip install 'trivet[bench]', or leave --plot out")


def check_can_write(flag: str, file: Path | None) -> None:
    """By opening it, for nothing else tells of every kind of place. Raises `TrivetError`."""
    if file is None:
        return
    try:
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise invalid(f"{flag} {file}: no file can be written there ({error.strerror})") from None


@contextmanager
def written_or_refused(flag: str, file: Path) -> Iterator[None]:
    """Turns what goes wrong with a file inside the block, such as a full disk, into a `TrivetError` that names it."""
    try:
        yield
    except OSError as error:
        raise TrivetError(
            ErrorKind.INTERNAL, f"{flag} {file} cannot be written ({error.strerror}); free the place or name another"
        ) from None


def write_json(file: Path | None, command: str, content: dict[str, Any]) -> None:
    """`content` beside what was asked, when, and on what machine; nothing when no file is wanted."""
    if file is None:
        return
    about = {"schema": SCHEMA, "command": command, "version": software_version(), "at": datetime.now(UTC).isoformat(), "machine": machine()}
    with written_or_refused("--json", file):
        file.write_text(json.dumps(about | content, indent=1) + "\n")


def draw(command: str, content: dict[str, Any], file: Path | None) -> None:
    """The plot of what `write_json` would write; nothing when none is wanted. matplotlib is loaded here at the earliest."""
    if file is not None:
        with written_or_refused("--plot", file):
            importlib.import_module("trivet.bench.plots").PLOTS[command](content, file)


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
