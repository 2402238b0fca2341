"""When a service that died is started again: after a pause that grows, and not for ever. Pure; owns the times of recent deaths.

A limit of 0 is another wish than a small one: no service is started again, and none has to go because another has.
"""

from collections import deque

from trivet_chassis.clock import Clock

WINDOW_S = 60.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0


class RestartPolicy:
    """Counts the deaths of all services together; `limit` of them within a minute are forgiven."""

    def __init__(self, clock: Clock, *, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._deaths: deque[float] = deque()

    @property
    def is_off(self) -> bool:
        """Whether deaths are left alone."""
        return self._limit == 0

    def pause_after_death(self) -> float | None:
        """Seconds until the restart, or None when this was one death too many."""
        now = self._clock.monotonic()
        while self._deaths and self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self._limit:
            return None
        return min(FIRST_PAUSE_S * 2.0 ** (len(self._deaths) - 1), LONGEST_PAUSE_S)
