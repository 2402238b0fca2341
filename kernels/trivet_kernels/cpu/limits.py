"""What this machine can do at most, measured: bytes read a second, operations a second out of registers, seconds for a team to meet.

Loops of native/limits.h that do nothing else, with the instruction set in use; what products, attention and whole steps reach is told as a
share of these. Each figure is the best of several rounds: others on the machine can only make it slower.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from trivet_kernels.cpu.library import native_library

MIB = 1 << 20
STEP = 512  # bytes; arrays are multiples of it


class LimitFormat(IntEnum):
    """What is multiplied; the numbers are those of native/limits.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured: the best of `rounds` rounds of about `round_s` each."""

    rounds: int = 100
    round_s: float = 0.003


def read_rate(threads: int, bytes_each: int, effort: Effort) -> float:
    """Bytes a second, by threads that each read an array of their own over and over. Raises NotBuilt and MemoryError."""
    size = max(STEP, bytes_each // STEP * STEP)
    # One pass through a small array is too short for a clock.
    passes = max(1, round(effort.round_s * 20e9 / size))
    seconds = np.zeros(effort.rounds, dtype=np.float64)
    if not native_library().trivet_time_reads(threads, size, passes, effort.rounds, seconds.ctypes.data):
        raise MemoryError(f"{threads} arrays of {size // MIB} MiB do not fit into memory")
    return threads * size * passes / float(seconds.min())


def product_rate(threads: int, kind: LimitFormat, effort: Effort) -> float:
    """Additions and multiplications a second by all threads together. Raises NotBuilt."""
    library, seconds = native_library(), np.zeros(effort.rounds, dtype=np.float64)
    trial = np.zeros(3, dtype=np.float64)
    turns = 20_000
    library.trivet_time_products(threads, kind, turns, len(trial), trial.ctypes.data)
    turns = max(1, round(turns * effort.round_s / float(trial.min())))
    operations: float = library.trivet_time_products(threads, kind, turns, effort.rounds, seconds.ctypes.data)
    return operations / float(seconds.min())


def meeting_seconds(threads: int, effort: Effort) -> float:
    """For all members of a team to meet once, when all are awake. Raises NotBuilt."""
    meetings, seconds = 1000, np.zeros(effort.rounds, dtype=np.float64)
    native_library().trivet_time_meetings(threads, meetings, effort.rounds, seconds.ctypes.data)
    return float(seconds.min()) / meetings
