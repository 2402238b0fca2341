"""How long the oldest unanswered step of one worker has run, and whether that is too long.

A step counts from when it could begin: when it was sent, or when the one before it was answered. It is given a multiple of its forecast,
never less than a floor; a step without a forecast (the first of a replica, which may compile and warm up) is given a fixed time. While
the worker announces other work (loading, compiling, capturing, an adapter) the age of a step says nothing.
"""

from collections import deque

from trivet_chassis.clock import Clock
from trivet_proto.v1 import types_pb2

from trivet_scheduler.awake import AwakeTimer
from trivet_scheduler.step_limits import StepLimits

IDLE_ACTIVITIES = (types_pb2.ACTIVITY_UNSPECIFIED, types_pb2.ACTIVITY_NONE)


class StepWatch:
    """Told of every step sent and answered, and of what the worker says it is busy with."""

    def __init__(self, limits: StepLimits, clock: Clock, tick_s: float) -> None:
        self._limits = limits
        self._clock = clock
        self._timer = AwakeTimer(clock, tick_s)
        self._pending: deque[float] = deque()  # limits of the unanswered steps, oldest first
        self._began_at = clock.monotonic()
        self._is_excused = False

    def sent(self, forecast_s: float | None) -> None:
        if not self._pending:
            self._restart()
        self._pending.append(self._limits.of(forecast_s))

    def answered(self) -> None:
        self._pending.popleft()
        self._restart()

    def progressed(self) -> None:
        """One of several iterations is answered: the next is given as long."""
        self._restart()

    def heard_activity(self, activity: "types_pb2.Activity.ValueType") -> None:
        self._is_excused = activity not in IDLE_ACTIVITIES
        if self._is_excused:
            self._restart()

    def overdue(self) -> str | None:
        """What is wrong with the oldest step; None while all is well. Wants to be asked every tick."""
        waited_s = self._timer.tick()
        if not self._pending or self._is_excused or waited_s <= self._pending[0]:
            return None
        return f"its oldest step is unanswered for {waited_s:.3g} s, {self._pending[0]:.3g} s were given"

    @property
    def age_s(self) -> float | None:
        """Of the oldest unanswered step; None without one, or when its age says nothing."""
        return self._clock.monotonic() - self._began_at if self._pending and not self._is_excused else None

    @property
    def limit_s(self) -> float:
        """What the oldest unanswered step is given."""
        return self._pending[0] if self._pending else self._limits.floor_s

    def _restart(self) -> None:
        self._timer.reset()
        self._began_at = self._clock.monotonic()
