"""Ctrl-C while there is nothing to stop yet, or nothing any more: the process ends by the signal, as programs do, without a traceback."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def let_interrupts_end_the_process() -> None:
    """From now on. An interrupt that somebody ignores or handles stays as it is."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interrupts_ending_the_process() -> Iterator[None]:
    """Within the block; afterwards an interrupt raises KeyboardInterrupt again, where it did before."""
    let_interrupts_end_the_process()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
