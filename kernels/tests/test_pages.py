"""Memory for weights and KV cache, of the kind that a kernel gives huge pages to; and freed memory, which leaves the process."""

import subprocess
import sys
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


# Each of them gets a small neighbour that stays; one comes before the others, for it is its end that changes glibc's mind.
COME_AND_GO = """
import numpy as np
from trivet_kernels.pages import give_large_blocks_back

assert give_large_blocks_back()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
np.ones(5 << 20, dtype=np.uint8)
before, large, small = resident(), [], []
for _ in range(8):
    large.append(np.ones(5 << 20, dtype=np.uint8))
    small.append(bytearray(100_000))
del large
print(resident() - before)
"""


@pytest.mark.skipif(not MAPS.exists(), reason="Linux alone tells what is resident this way")
def test_large_blocks_leave_the_process_when_they_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", COME_AND_GO], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 20
