"""Memory for what is read all over at every step, weights and KV cache; and how the process gives back what it needs now and then.

Huge pages are asked for. With small ones each block that attention reads costs a walk through the page tables, on a virtual machine through
two. The kernel gives them to private memory alone, unless it is told otherwise.
"""

import contextlib
import ctypes
import errno
import mmap

import torch

MALLOC_MMAP_THRESHOLD, MALLOC_TRIM_THRESHOLD = -3, -1  # glibc's numbers
LARGE, MOST_FREE = 4 << 20, 16 << 20  # bytes


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


def give_large_blocks_back() -> bool:
    """Return to the system what was freed so far, and from now on blocks of `LARGE` bytes and more as they are freed. False where malloc
    is another than glibc's.

    Left alone, glibc takes the first such block that is freed for a reason to keep all of up to 32 MiB in its heap, where a small neighbour
    then holds what nobody uses: 20 to 40 MiB that come and go for minutes. For a process of our own, and only where no step needs such
    blocks: new pages for each take as long as a layer's products.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return False
    libc.malloc_trim(0)
    return bool(libc.mallopt(MALLOC_MMAP_THRESHOLD, LARGE)) and bool(libc.mallopt(MALLOC_TRIM_THRESHOLD, MOST_FREE))
