"""When a call that found nobody is made again, and how much time it has left.

Only UNAVAILABLE is tried again, and only before the first event of a stream was received: from then on the caller has seen part of an
answer, and a second attempt would be another one. Everything else is the caller's to decide.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_client.errors import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits grow from `first_wait` by `growth` up to `longest_wait`, each drawn between half of that and all of it; times in seconds.

    A server that names a later time gets it, up to `longest_retry_after`; one that names a time beyond that is not waited for. One attempt
    is none again. Raises `InvalidRequestError` for numbers that make no sense.
    """

    attempts: int = 4
    first_wait: float = 0.2
    growth: float = 2.0
    longest_wait: float = 5.0
    longest_retry_after: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise invalid(f"attempts is {self.attempts}; 1 means that nothing is tried again", "attempts")
        for name in ("first_wait", "longest_wait", "longest_retry_after"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise invalid(f"{name} is {seconds}; it takes seconds from 0 on", name)
        if not 1 <= self.growth < math.inf:
            raise invalid(f"growth is {self.growth}; it takes a factor from 1 on", "growth")


class Attempts:
    """The attempts of one call. Owns its deadline, which all of them share."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._failed = 0
        self._next_wait = policy.first_wait
        self._deadline = None if timeout is None else clock() + timeout

    def remaining(self) -> float | None:
        """Seconds until the deadline, 0 when it has passed; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def wait_after(self, error: TrivetError) -> float | None:
        """Seconds to wait before the next attempt; None when there is none and `error` is the call's."""
        self._failed += 1
        if error.kind is not ErrorKind.UNAVAILABLE or not error.retryable or self._failed >= self._policy.attempts:
            return None
        longest = min(self._policy.longest_wait, self._next_wait)
        self._next_wait = longest * self._policy.growth
        wait = self._draw(longest / 2, longest)
        if error.retry_after_ms is not None:
            asked = error.retry_after_ms / 1000
            if asked > self._policy.longest_retry_after:
                return None
            wait = max(wait, asked)
        remaining = self.remaining()
        return None if remaining is not None and wait >= remaining else wait


def deadline_of(timeout: float | None, default: float | None) -> float | None:
    """Seconds for a call, None for none: its own `timeout`, or the client's; infinity is none. Raises `InvalidRequestError`."""
    seconds = default if timeout is None else timeout
    if seconds is None or seconds == math.inf:
        return None
    if not seconds > 0:
        raise invalid(f"timeout is {seconds}; it takes seconds above 0, or math.inf for none", "timeout")
    return float(seconds)
