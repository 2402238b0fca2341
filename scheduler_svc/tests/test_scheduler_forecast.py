"""The forecast of a step's time: a fixed part and a part per token, learnt from what was seen."""

import pytest
from trivet_scheduler.forecast import PRIOR_SECONDS_PER_TOKEN, StepForecast


def seen(*steps: tuple[int, float]) -> StepForecast:
    forecast = StepForecast()
    for num_tokens, seconds in steps:
        forecast.observe(num_tokens, seconds)
    return forecast


def test_nothing_is_forecast_before_a_step_was_seen() -> None:
    assert StepForecast().seconds(1) is None


def test_a_fixed_part_and_a_part_per_token_are_found() -> None:
    forecast = seen(*((tokens, 0.01 + 0.002 * tokens) for tokens in (1, 512, 1, 1, 300, 1, 40) * 5))
    for tokens in (1, 100, 2000):
        assert forecast.seconds(tokens) == pytest.approx(0.01 + 0.002 * tokens, rel=0.05, abs=0.002)


def test_steps_of_one_size_leave_the_slope_to_the_prior() -> None:
    forecast = seen(*((1, 0.02) for _ in range(1000)))
    assert forecast.seconds(1) == pytest.approx(0.02)
    assert forecast.seconds(1001) == pytest.approx(0.02 + 1000 * PRIOR_SECONDS_PER_TOKEN)


def test_a_machine_that_slows_down_is_followed() -> None:
    forecast = seen(*((1, 0.01) for _ in range(100)), *((1, 0.5) for _ in range(60)))
    assert forecast.seconds(1) == pytest.approx(0.5, rel=0.1)


def test_no_forecast_is_negative() -> None:
    forecast = seen(*((tokens, seconds) for tokens, seconds in ((1, 5.0), (1000, 0.1), (1, 4.0), (900, 0.1))))
    assert all(forecast.seconds(tokens) >= 0 for tokens in (1, 500, 5000))
