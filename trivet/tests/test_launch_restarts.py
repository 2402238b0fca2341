"""How often and how soon a service is restarted."""

from trivet.launch.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, WINDOW_S, RestartPolicy
from trivet_chassis.clock import ManualClock


def test_pauses_grow_up_to_a_limit() -> None:
    policy = RestartPolicy(ManualClock(), limit=100)
    pauses = [policy.pause_after_death() for _ in range(12)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_one_death_more_than_the_limit_within_a_minute_is_the_end() -> None:
    clock = ManualClock()
    policy = RestartPolicy(clock, limit=2)
    assert policy.pause_after_death() is not None
    clock.advance(WINDOW_S - 1)
    assert policy.pause_after_death() is not None
    assert policy.pause_after_death() is None


def test_deaths_are_forgotten_after_a_minute() -> None:
    clock = ManualClock()
    policy = RestartPolicy(clock, limit=1)
    for _ in range(5):
        assert policy.pause_after_death() == FIRST_PAUSE_S
        clock.advance(WINDOW_S)


def test_a_limit_of_zero_never_restarts() -> None:
    policy = RestartPolicy(ManualClock(), limit=0)
    assert policy.is_off
    assert policy.pause_after_death() is None
    assert not RestartPolicy(ManualClock(), limit=1).is_off
