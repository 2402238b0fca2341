"""A request under way, wherever it rides: on a scheduler's session, or on none while a hand-over looks for one.

The submission owns its streams, its time limit and the memory of its troubles; readers stop or abort it without knowing where it is. It
decides nothing about schedulers (`handover.py`) and puts nothing on the wire (`session.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine.request import AbortReason, EngineRequest
from trivet_frontend.engine.token_stream import TokenStream


class Carrier(Protocol):
    """The session that a submission rides on."""

    def stop(self, stream: TokenStream, count: int) -> None: ...

    def abort(self, streams: tuple[TokenStream, ...], reason: AbortReason) -> None: ...


@dataclass(slots=True)
class Troubles:
    """What went wrong since the last token came; a token makes all of it good. Kept for `handover.py`."""

    losses: int = 0
    refusals: int = 0
    homeless_seconds: float = 0.0
    # Who is not asked again before when, on the monotonic clock.
    refused_by: set[str] = field(default_factory=set)
    retry_at: float = 0.0


class Submission:
    """One prompt and its children, from `EngineClient.submit` to the end of the last child."""

    def __init__(self, request: EngineRequest, *, fingerprint: bytes, now: float, on_end: Callable[["Submission"], None]) -> None:
        self.request = request
        # Only a scheduler of this fingerprint goes on as another began.
        self.fingerprint = fingerprint
        self.streams = tuple(TokenStream(index=index, on_end=self._note_end) for index in range(request.n))
        self.carrier: Carrier | None = None
        self.troubles: Troubles | None = None
        self.moved = False
        # When it was submitted, and when something last came for it.
        self.submitted_at = now
        self.heard_at = now
        self._on_end = on_end
        self._running = request.n
        self._time_limit: asyncio.TimerHandle | None = None
        if request.timeout_ms is not None:
            self._time_limit = asyncio.get_running_loop().call_later(request.timeout_ms / 1000, self._expire)

    @property
    def ended(self) -> bool:
        """Whether every child has ended."""
        return self._running == 0

    @property
    def is_fresh(self) -> bool:
        """Whether no scheduler has said anything about it yet, so that it is as good as new."""
        return not any(stream.ended or stream.delivered or stream.prompt_rows or stream.has_cached_tokens for stream in self.streams)

    @property
    def is_waiting(self) -> bool:
        """Whether no child has a token yet."""
        return not any(stream.delivered for stream in self.streams)

    def stop(self, stream: TokenStream, count: int) -> None:
        """The child ends with its first `count` tokens: the text says so."""
        if self.carrier is not None:
            self.carrier.stop(stream, count)
        stream.close()

    def abort(self, reason: AbortReason) -> None:
        """Give up every child that has not ended."""
        self.abort_streams(self.streams, reason)

    def abort_streams(self, streams: tuple[TokenStream, ...], reason: AbortReason) -> None:
        """Give up some of the children."""
        if self.carrier is not None:
            self.carrier.abort(streams, reason)
        for stream in streams:
            stream.close()

    def fail(self, error: TrivetError) -> None:
        """End every child that has not ended with `error`; the carrier knows already."""
        for stream in self.streams:
            stream.fail(error)

    def _expire(self) -> None:
        if self.carrier is not None:
            self.carrier.abort(self.streams, AbortReason.DEADLINE)
        self.fail(TrivetError(ErrorKind.DEADLINE_EXCEEDED, "the request's time ran out before it was finished"))

    def _note_end(self) -> None:
        self._running -= 1
        if self._running:
            return
        if self._time_limit is not None:
            self._time_limit.cancel()
        self._on_end(self)
