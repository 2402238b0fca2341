"""A count of changes that tasks can wait on without missing one."""

import asyncio


class Changes:
    """Note the count, look at the state, then wait for a change `after` that count: what came in between is not missed."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        self.count += 1
        reached, self._next = self._next, asyncio.Event()
        reached.set()

    async def after(self, seen: int) -> None:
        """Return when the count is beyond `seen`."""
        while self.count <= seen:
            await self._next.wait()
