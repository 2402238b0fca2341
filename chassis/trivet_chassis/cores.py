"""The cores that this process may use, and how many threads make sense on them. It starts no threads and pins none."""

import os

from trivet_proto.errors import invalid

THREADS_PER_CORE = 4
"""A few more threads than cores are slow; hundreds that spin for each other never end a step."""

TOO_MANY_THREADS = f"more than {THREADS_PER_CORE} threads for each core that this process may use only wait for each other"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def most_threads() -> int:
    return THREADS_PER_CORE * usable_cores()


def check_threads(count: int, label: str) -> None:
    """Raises INVALID_ARGUMENT for more than make sense; `label` says where `count` was written."""
    if count > most_threads():
        raise invalid(f"{label}: {count} is above {most_threads()}: {TOO_MANY_THREADS}")
