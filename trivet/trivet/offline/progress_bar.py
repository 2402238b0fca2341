"""The progress of a batch on a terminal, drawn by the thread that waits for it; elsewhere nothing is shown."""

import concurrent.futures
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from trivet_frontend.offline import Batch

T = TypeVar("T")

REDRAW_S = 0.1


def wait_with_progress(future: "concurrent.futures.Future[T]", batch: Batch) -> T:
    """What `future` gives, with a bar for `batch` meanwhile."""
    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=batch.size, rate="")
        while True:
            done, _ = concurrent.futures.wait({future}, timeout=None if bar.disable else REDRAW_S)
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{batch.prompt_tokens} tokens in, {batch.output_tokens} out" + (
                f", {batch.output_tokens / elapsed:.0f} out/s" if elapsed else ""
            )
            bar.update(task, completed=batch.finished, rate=rate, refresh=True)
            if done:
                return future.result()
