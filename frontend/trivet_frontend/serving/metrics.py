"""What the frontend counts, under vLLM's names where vLLM has one, and the schedulers' gauges out of their load reports.

One registry per process, owned by the server. Labels are vLLM's: `model_name` and, for what a scheduler reports, `engine` (the
scheduler's name). A series of a scheduler that is away vanishes rather than keep its last value.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trivet_frontend.engine import LoadReport
from trivet_frontend.serving.loop_metrics import LoopCounter, LoopHistogram

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

FINISH_REASONS = ("stop", "length", "abort", "error")


class FrontendMetrics:
    """Counters and histograms of one frontend, for one model name."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, loads: Callable[[], list[tuple[str, LoadReport]]]) -> None:
        self.registry = registry

        def labelled(metric: Counter | Histogram | Gauge) -> Counter | Histogram | Gauge:
            return metric.labels(model_name=model_name)

        def counter(name: str, text: str) -> Counter:
            return labelled(Counter(name, text, ["model_name"], registry=registry))  # type: ignore[return-value]

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return labelled(Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=registry))  # type: ignore[return-value]

        def gauge(name: str, text: str) -> Gauge:
            return labelled(Gauge(name, text, ["model_name"], registry=registry))  # type: ignore[return-value]

        success = Counter("vllm:request_success", "Finished requests.", ["model_name", "finished_reason"], registry=registry)
        # All reasons exist from the start, so that a rate over a series that had no event yet is zero and not absent.
        self.finished = {reason: success.labels(model_name=model_name, finished_reason=reason) for reason in FINISH_REASONS}
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that gave a first token.")
        labels = {"model_name": model_name}
        self.generation_tokens = LoopCounter("vllm:generation_tokens", "Generated tokens.", labels, registry=registry)
        self.time_to_first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS)
        self.inter_token_latency = LoopHistogram(
            "vllm:inter_token_latency_seconds", "Between successive deltas of one stream.", labels, _ITL_BUCKETS, registry=registry
        )
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _E2E_BUCKETS)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self.request_generation_tokens = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _TOKEN_BUCKETS)
        self.requests_in_flight = gauge("trivet_frontend_requests_in_flight", "Requests that this frontend is serving.")
        registry.register(_EngineCollector(model_name, loads))


_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "Requests that the engine is running.", "requests_running"),
    ("vllm:num_requests_waiting", "Requests that wait for the engine.", "requests_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
    ("trivet_engine_replicas_ready", "Workers that are ready.", "replicas_ready"),
    ("trivet_engine_waiting_uncached_tokens", "Prompt tokens that wait and are not cached.", "waiting_uncached_tokens"),
    ("trivet_engine_blocks_in_use", "KV blocks that live requests hold.", "blocks_in_use"),
    ("trivet_engine_blocks_total", "KV blocks there are.", "blocks_total"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_preemptions", "Preemptions.", "preemptions_total"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits_total"),
    ("trivet_engine_steps", "Steps that the engine has run.", "steps_total"),
)


class _EngineCollector(Collector):
    """Reads the load reports when scraped; holds nothing itself."""

    def __init__(self, model_name: str, loads: Callable[[], list[tuple[str, LoadReport]]]) -> None:
        self._model_name = model_name
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        loads = self._loads()
        labels = ["model_name", "engine"]
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
            *((GaugeMetricFamily(name, text, labels=labels), field) for name, text, field in _GAUGES),
            *((CounterMetricFamily(name, text, labels=labels), field) for name, text, field in _COUNTERS),
        ]
        for family, field in families:
            for engine, load in loads:
                family.add_metric([self._model_name, engine], getattr(load, field))
            yield family
