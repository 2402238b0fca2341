"""Memory for what is read all over at every step: weights and KV cache.

Huge pages are asked for. With small ones each block that attention reads costs a walk through the page tables, on a virtual machine through
two. The kernel gives them to private memory alone, unless it is told otherwise.
"""

import contextlib
import errno
import mmap

import torch


def zeroed_bytes(size: int) -> torch.Tensor:
    """uint8 `[size]` that begins on a page and costs nothing until it is written; torch.zeros would touch all of it now.

    Raises MemoryError where the system grants no such range.
    """
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size} bytes cannot be mapped") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
