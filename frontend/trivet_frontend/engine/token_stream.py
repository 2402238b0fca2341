"""The tokens of one child on their way from a session to the one task that reads them.

The session pushes, the reader takes; what is not taken yet merges into one delta, so a slow reader holds at most its own output and never
makes another stream wait. What was pushed once stays: when the child moves to another scheduler, the stream says what it has already
(`resume.py`) and drops what is reported a second time. The stream knows nothing of text or of the wire.
"""

import asyncio
from array import array
from collections.abc import Callable

from trivet_proto.errors import TrivetError

from trivet_frontend.engine.request import TokenDelta


class TokenStream:
    """One child's deltas; exactly one reader. `on_end` is called once, when nothing more can come."""

    __slots__ = (
        "_closed",
        "_error",
        "_on_end",
        "_pending",
        "_waiter",
        "delivered",
        "handle",
        "has_cached_tokens",
        "index",
        "pending_since",
        "prompt_rows",
    )

    def __init__(self, *, index: int, on_end: Callable[[], None]) -> None:
        self.index = index
        # Its name on the session that carries it; another one after a hand-over.
        self.handle = 0
        # All tokens that schedulers have delivered, read or not: a hand-over names them, and they are not computed again.
        self.delivered = array("i")
        # Of the prompt's logprobs and of the cached tokens: what has been reported.
        self.prompt_rows = 0
        self.has_cached_tokens = False
        self.pending_since: float | None = None
        self._on_end = on_end
        self._pending: TokenDelta | None = None
        self._error: TrivetError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether nothing more can come: the last delta or an error has been pushed, or the reader has had enough."""
        return self._closed

    def push(self, delta: TokenDelta, *, now: float) -> None:
        """Raises ValueError for prompt logprobs that leave a gap."""
        if self._closed:
            return
        self._drop_repeated(delta)
        self.delivered.extend(delta.token_ids)
        if self._pending is None:
            self._pending = delta
            self.pending_since = now
        else:
            self._pending.merge(delta)
        if delta.finish_reason is not None:
            self._end()
        self._wake()

    def fail(self, error: TrivetError) -> None:
        """End the stream with an error, after what was already pushed."""
        if self._closed:
            return
        self._error = error
        self._end()
        self._wake()

    def close(self) -> None:
        """The reader needs nothing more than it has."""
        if not self._closed:
            self._end()

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
        return delta

    def _drop_repeated(self, delta: TokenDelta) -> None:
        if delta.cached_tokens is not None:
            if self.has_cached_tokens:
                delta.cached_tokens = None
            self.has_cached_tokens = True
        if delta.prompt_logprobs is not None:
            known = self.prompt_rows + 1 - delta.prompt_position
            if known < 0:
                raise ValueError(f"prompt logprobs go on at position {delta.prompt_position}, {self.prompt_rows + 1} was next")
            delta.prompt_logprobs.drop(known)
            self.prompt_rows += len(delta.prompt_logprobs.ranks)

    def _end(self) -> None:
        self._closed = True
        self._on_end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
