"""The tokens of one child on their way from a session to the one task that reads them.

The session pushes, the reader takes; what is not taken yet merges into one delta, so a slow reader holds at most its own output and never
makes another stream wait. The stream knows nothing of text or of the wire.
"""

import asyncio

from trivet_proto.errors import TrivetError

from trivet_frontend.engine.request import TokenDelta


class TokenStream:
    """One child's deltas; exactly one reader."""

    __slots__ = ("_closed", "_error", "_pending", "_waiter", "delivered", "handle", "index", "pending_since")

    def __init__(self, *, handle: int, index: int) -> None:
        self.handle = handle
        self.index = index
        # The tokens already passed on, which a hand-over to another scheduler has to name.
        self.delivered: list[int] = []
        self.pending_since: float | None = None
        self._pending: TokenDelta | None = None
        self._error: TrivetError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether the last delta or an error has been pushed: nothing more can come."""
        return self._closed

    def push(self, delta: TokenDelta, *, now: float) -> None:
        if self._closed:
            return
        if self._pending is None:
            self._pending = delta
            self.pending_since = now
        else:
            self._pending.merge(delta)
        self._closed = delta.finish_reason is not None
        self._wake()

    def fail(self, error: TrivetError) -> None:
        """End the stream with an error, after what was already pushed."""
        if self._closed:
            return
        self._error = error
        self._closed = True
        self._wake()

    async def next(self) -> TokenDelta:
        """The next delta, waiting for it; raises the `TrivetError` that ended the stream."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the stream was read past its end")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta, self._pending, self.pending_since = self._pending, None, None
        self.delivered.extend(delta.token_ids)
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
