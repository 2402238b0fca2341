"""Time that a peer kept us waiting, and how much of it is too much.

A process that was stopped, swapped out or starved for a while must not take its peers for silent: their words wait in its own sockets.
So waits are summed over ticks, and a tick that came late counts only for what a tick may last.
"""

from dataclasses import dataclass

from trivet_chassis.clock import Clock


@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds: how often either end of a stream speaks, and after how long a silence the stream ends (three beats and some)."""

    beat_s: float = 1.0
    silence_s: float = 3.5

    @property
    def tick_s(self) -> float:
        """How often a watchdog looks."""
        return self.beat_s / 2


STEADY = Pulse()


class AwakeTimer:
    """Seconds since the last `reset`, without those in which this process did not run. `tick` wants to be called every `tick_s`."""

    def __init__(self, clock: Clock, tick_s: float) -> None:
        self._clock = clock
        self._longest_tick_s = 2 * tick_s
        self._waited_s = 0.0
        self._looked_at = clock.monotonic()

    def reset(self) -> None:
        self._waited_s = 0.0
        self._looked_at = self._clock.monotonic()

    def tick(self) -> float:
        now = self._clock.monotonic()
        self._waited_s += min(now - self._looked_at, self._longest_tick_s)
        self._looked_at = now
        return self._waited_s
