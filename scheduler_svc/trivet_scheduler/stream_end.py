"""How one stream ends: decided once, by whoever first has a reason."""

import asyncio
from collections.abc import Callable

from trivet_proto.errors import TrivetError


class StreamEnd:
    """`decide` may be called from anywhere on the loop; the stream's own handler waits for it."""

    def __init__(self, on_decided: Callable[[], None]) -> None:
        """`on_decided` runs at once with the decision: from then on nothing of the stream counts."""
        self._on_decided = on_decided
        self.error: TrivetError | None = None
        self._decided = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def is_decided(self) -> bool:
        return self._decided.is_set()

    def decide(self, error: TrivetError | None) -> bool:
        """End it, with an error or in peace; False when that was decided before."""
        if self._decided.is_set():
            return False
        self.error = error
        self._decided.set()
        self._on_decided()
        return True

    async def wait(self) -> None:
        """Return when it ended in peace. Raises what it ended with."""
        await self._decided.wait()
        if self.error is not None:
            raise self.error

    def leave(self) -> None:
        """Its handler is done: nothing of it runs any more."""
        self._left.set()

    async def until_left(self, limit_s: float) -> bool:
        """Wait for the handler; False when it took longer than `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                await self._left.wait()
        except TimeoutError:
            return False
        return True
