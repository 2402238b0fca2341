"""Memory for weights and KV cache: of the kind that a kernel gives huge pages to."""

from pathlib import Path

import pytest
import torch
from trivet_kernels.pages import zeroed_bytes

MAPS = Path("/proc/self/maps")


def test_memory_is_zeroed_and_can_be_written() -> None:
    memory = zeroed_bytes(10_000)

    assert memory.dtype is torch.uint8
    assert memory.count_nonzero() == 0
    memory.fill_(7)
    assert memory.sum() == 70_000


@pytest.mark.skipif(not MAPS.exists(), reason="Linux alone lists a process's mappings")
def test_memory_is_private_since_shared_memory_gets_small_pages_whatever_is_asked_for() -> None:
    memory = zeroed_bytes(4 << 20)

    place = memory.data_ptr()
    ranges = [(line.split()[0].split("-"), line.split()[1]) for line in MAPS.read_text().splitlines()]
    rights = [mode for (first, last), mode in ranges if int(first, 16) <= place < int(last, 16)]
    assert rights == ["rw-p"]


def test_a_range_that_no_system_grants_is_want_of_memory() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes cannot be mapped"):
        zeroed_bytes(1 << 60)
