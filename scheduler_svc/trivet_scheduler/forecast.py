"""How long a step will take: a fixed part and a part per token, learnt from the steps before.

Least squares over exponentially weighted averages, drawn toward a prior slope while the steps seen had all the same number of tokens and
so say nothing about it. Good to a factor of two or so: for telling a slow step from a dead worker, not for planning.
"""

PRIOR_SECONDS_PER_TOKEN = 0.005  # a small processor and a model too large for it: who is slower still gives other signs of life
PRIOR_VARIANCE = 64.0  # tokens²: spread from which on the steps seen count for more than the prior
LEAST_WEIGHT = 0.05  # of the newest step, so that about the last twenty count


class StepForecast:
    """Owns the averages of one replica's steps."""

    def __init__(self) -> None:
        self._observations = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._variance = 0.0  # of tokens
        self._covariance = 0.0  # of tokens and seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that was done."""
        self._observations += 1
        weight = max(1 / self._observations, LEAST_WEIGHT)
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * tokens_off
        self._seconds += weight * seconds_off
        self._variance = (1 - weight) * (self._variance + weight * tokens_off * tokens_off)
        self._covariance = (1 - weight) * (self._covariance + weight * tokens_off * seconds_off)

    def seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens is expected to take; None before the first was seen, which may compile and warm up."""
        if not self._observations:
            return None
        slope = (self._covariance + PRIOR_VARIANCE * PRIOR_SECONDS_PER_TOKEN) / (self._variance + PRIOR_VARIANCE)
        return max(0.0, self._seconds + max(0.0, slope) * (num_tokens - self._tokens))
