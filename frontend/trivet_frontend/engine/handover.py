"""Requests without a scheduler: kept until one takes them up where they were left, or until their time is over.

A request comes here when its session ended or when its scheduler gave it back (it drains, it has no worker). It goes to any ready
scheduler of equal fingerprint, to the same one when that is back. Who refused it is not asked again at once, and the pause grows with
each refusal. What counts against the limit is the time without a home since the last token came; a request that was lost with its
scheduler several times without a token between is given up, for it may be what brings them down.
"""

import asyncio
import contextlib
from collections.abc import Callable, Set
from dataclasses import dataclass

from trivet_chassis.clock import Clock
from trivet_proto.errors import TrivetError

from trivet_frontend.engine.session import SchedulerSession
from trivet_frontend.engine.submission import Submission, Troubles
from trivet_frontend.engine.wire import lost_error

MOST_LOSSES = 3
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0

Choose = Callable[[Submission, Set[str]], SchedulerSession | None]
"""The session that should take a request, none of those at the given addresses; None when there is none."""


@dataclass(frozen=True, slots=True)
class Homeless:
    """A request that rides nowhere, since when, and what its streams end with when nobody takes it up."""

    submission: Submission
    since: float
    error: TrivetError


class HandOver:
    """Owns the requests without a scheduler, the oldest first."""

    def __init__(self, *, clock: Clock, limit_seconds: float, choose: Choose) -> None:
        """`limit_seconds`: how long a request may be without a home; 0: it ends at once."""
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._choose = choose
        self._homeless: dict[Submission, Homeless] = {}
        self._changed = asyncio.Event()

    @property
    def submissions(self) -> list[Submission]:
        return list(self._homeless)

    def take_lost(self, submission: Submission, error: TrivetError) -> None:
        """The session of a request ended."""
        troubles = _troubles_of(submission)
        troubles.losses += 1
        self._take(submission, error, given_up=troubles.losses >= MOST_LOSSES)

    def take_refused(self, submission: Submission, error: TrivetError, address: str) -> None:
        """The scheduler at `address` gave a request back."""
        troubles = _troubles_of(submission)
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(troubles.refusals, 10))
        troubles.refusals += 1
        troubles.refused_by.add(address)
        troubles.retry_at = self._clock.monotonic() + pause
        self._take(submission, error, given_up=False)

    def forget(self, submission: Submission) -> None:
        """A request has ended, wherever it was."""
        self._homeless.pop(submission, None)

    def wake(self) -> None:
        """A session came or changed: somebody may find a home."""
        self._changed.set()

    def close(self) -> None:
        """Nobody is waited for any longer: what is here and what comes ends with its error."""
        self._limit_seconds = 0.0
        for homeless in list(self._homeless.values()):
            homeless.submission.fail(homeless.error)

    async def run(self) -> None:
        """Find homes until cancelled."""
        while True:
            self._changed.clear()
            for homeless in list(self._homeless.values()):
                self._settle(homeless)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next()):
                    await self._changed.wait()

    def _take(self, submission: Submission, error: TrivetError, *, given_up: bool) -> None:
        if given_up or not self._limit_seconds:
            submission.fail(error)
        if submission.ended:
            return
        homeless = self._homeless[submission] = Homeless(submission, self._clock.monotonic(), error)
        self._settle(homeless)
        self._changed.set()

    def _settle(self, homeless: Homeless) -> None:
        """Give a request a home if there is one, and an end if its time is over."""
        submission, now = homeless.submission, self._clock.monotonic()
        if submission not in self._homeless:
            return
        troubles = _troubles_of(submission)
        if now >= troubles.retry_at:
            troubles.refused_by.clear()
        session = self._choose(submission, troubles.refused_by)
        if session is not None:
            troubles.homeless_seconds += now - homeless.since
            del self._homeless[submission]
            submission.moved = True
            try:
                session.carry(submission)
            except TrivetError:
                submission.fail(lost_error())
        elif now >= self._over_at(homeless):
            submission.fail(homeless.error)

    def _over_at(self, homeless: Homeless) -> float:
        return homeless.since + self._limit_seconds - _troubles_of(homeless.submission).homeless_seconds

    def _seconds_to_next(self) -> float | None:
        """Until something must be looked at again though nothing changed."""
        if not self._homeless:
            return None
        now = self._clock.monotonic()
        times = [self._over_at(homeless) for homeless in self._homeless.values()]
        times += [at for homeless in self._homeless.values() if (at := _troubles_of(homeless.submission).retry_at) > now]
        return max(0.0, min(times) - now)


def _troubles_of(submission: Submission) -> Troubles:
    if submission.troubles is None:
        submission.troubles = Troubles()
    return submission.troubles
