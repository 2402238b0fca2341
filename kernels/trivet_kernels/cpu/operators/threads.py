"""The operators' threads: one team for the process, as many as torch has unless told otherwise."""

import ctypes
from functools import cache

import torch

from trivet_kernels.cpu.library import native_library


@cache
def operator_library() -> ctypes.CDLL:
    """Raises NotBuilt."""
    library = native_library()
    library.trivet_operators_use_threads(torch.get_num_threads())
    return library


def use_threads(count: int) -> None:
    """From the next operator on; the bits of a result do not depend on it. Raises NotBuilt."""
    operator_library().trivet_operators_use_threads(count)
