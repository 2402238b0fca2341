"""For all tests of the doubles: the synthetic model, a folder for sockets, a real scheduler."""

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from trivet_doubles.model import DoubleModel, synthetic_model

sys.path.insert(0, str(Path(__file__).parent))

from real_scheduler import running_scheduler


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    # A socket's path has room for about 100 characters, which pytest's folders exceed.
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def model() -> DoubleModel:
    return synthetic_model()


@pytest.fixture
async def scheduler(socket_folder: Path) -> AsyncIterator[str]:
    """The address of a real scheduler."""
    async with running_scheduler(f"unix:{socket_folder}/s.sock") as address:
        yield address
