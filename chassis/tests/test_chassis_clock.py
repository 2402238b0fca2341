"""Clocks: both kinds keep the same promises."""

import time

from trivet_chassis.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_reads_the_machine() -> None:
    clock: Clock = SystemClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert abs(clock.wall() - time.time()) < 60


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(start=10, wall=100)
    assert (clock.monotonic(), clock.wall()) == (10, 100)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (12.5, 102.5)


def test_a_jump_of_the_wall_clock_leaves_the_monotonic_one() -> None:
    clock = ManualClock(start=10, wall=100)
    clock.jump(-50)
    assert (clock.monotonic(), clock.wall()) == (10, 50)
