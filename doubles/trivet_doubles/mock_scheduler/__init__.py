"""A scheduler without workers: the real `Session` protocol, tokens by the token law, faults on cue."""

from trivet_doubles.mock_scheduler.config import MockSchedulerSettings
from trivet_doubles.mock_scheduler.faults import Faults
from trivet_doubles.mock_scheduler.scheduler import MockScheduler

__all__ = ["Faults", "MockScheduler", "MockSchedulerSettings"]
