"""How many calls of clients are being served, on HTTP and gRPC together: from the first look at a request to its last byte.

A call whose generation has ended may still be writing to a client that does not read; it counts until it is gone.
"""

import contextlib
from collections.abc import Iterator


class OpenStreams:
    """The count; both public APIs add to it."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """One more, until the block is left."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
