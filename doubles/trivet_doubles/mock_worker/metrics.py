"""The mock worker's `/metrics`: what it ran, and whether a context was ever not what it had to be."""

from prometheus_client import CollectorRegistry, Counter, Gauge
from trivet_chassis.metrics import create_registry
from trivet_proto.v1 import worker_pb2

from trivet_doubles.mock_worker.life import Life


class MockWorkerMetrics:
    """Filled from each step's result."""

    def __init__(self, life: Life) -> None:
        self.registry: CollectorRegistry = create_registry("mock_worker")
        self._steps = Counter("trivet_worker_steps", "Steps, by status", ["status"], registry=self.registry)
        self._tokens = Counter("trivet_worker_tokens", "Tokens run", registry=self.registry)
        attached = Gauge("trivet_worker_attached", "1 while attached to a scheduler", registry=self.registry)
        attached.set_function(lambda: float(life.is_attached))
        streams = Gauge("trivet_streams", "Streams to schedulers that are open", registry=self.registry)
        streams.set_function(lambda: float(life.is_attached))
        wrong = Gauge("trivet_mock_worker_wrong_slots", "KV slots that did not hold what a request needed", registry=self.registry)
        wrong.set_function(lambda: float(life.wrong_slots))
        life.observe = self._observe

    def _observe(self, result: worker_pb2.StepResult) -> None:
        self._steps.labels(worker_pb2.StepStatus.Name(result.status).removeprefix("STEP_STATUS_").lower()).inc()
        self._tokens.inc(result.stats.num_tokens)
