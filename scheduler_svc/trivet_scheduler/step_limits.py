"""How long a worker may take for a step before it counts as lost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Seconds a step may take: `max(floor_s, factor * forecast)`, or `first_s` without a forecast."""

    floor_s: float = 10.0
    factor: float = 20.0
    first_s: float = 120.0

    def of(self, forecast_s: float | None) -> float:
        return self.first_s if forecast_s is None else max(self.floor_s, self.factor * forecast_s)
