"""Standard output, whose reader may leave before us, as `head` does."""

import os
import sys


def flush_output() -> None:
    """Raises BrokenPipeError where the reader has left with something unread."""
    if sys.stdout is not None:  # it was closed before we began
        sys.stdout.flush()


def discard_output() -> None:
    """What is still to be written, and all that will be, goes nowhere; otherwise it would fail once more when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
