"""The worker's own `/metrics`: where a step's time goes, how much it runs."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from trivet_chassis.metrics import create_registry
from trivet_proto.v1 import worker_pb2

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
PHASES = ("link", "input", "forward", "sample")


class WorkerMetrics:
    """Filled from each step's result."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = create_registry("worker")
        phases = Histogram("trivet_worker_step_seconds", "Time of a step, by phase", ["phase"], buckets=BUCKETS, registry=self.registry)
        self._phases = {phase: phases.labels(phase) for phase in PHASES}  # looked up once: this is done with every step
        self._steps = Counter("trivet_worker_steps", "Steps, by status", ["status"], registry=self.registry)
        self._tokens = Counter("trivet_worker_tokens", "Tokens run", registry=self.registry)
        self._broken = Counter("trivet_worker_non_finite_rows", "Rows whose logits were not finite", registry=self.registry)
        self.streams = Gauge("trivet_streams", "Open streams to schedulers", registry=self.registry)
        self.kv_cache_bytes = Gauge("trivet_worker_kv_cache_bytes", "Size of the KV cache of this epoch", registry=self.registry)
        self.memory_available = Gauge(
            "trivet_worker_memory_available_bytes", "Memory that this process could still take", registry=self.registry
        )
        self.attached = Gauge("trivet_worker_attached", "1 while attached to a scheduler", registry=self.registry)

    def observe(self, result: worker_pb2.StepResult) -> None:
        self._steps.labels(worker_pb2.StepStatus.Name(result.status).removeprefix("STEP_STATUS_").lower()).inc()
        if result.status != worker_pb2.STEP_STATUS_DONE:
            return
        timing = result.timing
        microseconds = (timing.link_us, timing.input_us, timing.forward_us, timing.sample_us)
        for phase, duration in zip(PHASES, microseconds, strict=True):
            self._phases[phase].observe(duration / 1e6)
        self._tokens.inc(result.stats.num_tokens)
        self._broken.inc(result.flags.count(worker_pb2.ROW_FLAG_NON_FINITE))
