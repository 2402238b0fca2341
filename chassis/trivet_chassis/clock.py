"""The only clocks that code may read, so that a test can move time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. `monotonic` measures; `wall` (Unix time) is for logs and for what a client shows, never for decisions."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self, start: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = start
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        self._monotonic += seconds
        self._wall += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock alone, as an operator or NTP would."""
        self._wall += seconds
