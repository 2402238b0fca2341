"""A worker without a model: the real `Attach` protocol, tokens by the token law, faults on cue."""

from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.faults import Faults
from trivet_doubles.mock_worker.worker import MockWorker

__all__ = ["Faults", "MockWorker", "MockWorkerSettings"]
