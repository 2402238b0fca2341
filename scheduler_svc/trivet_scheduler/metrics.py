"""The scheduler's own `/metrics`: vLLM's names for what vLLM has, `trivet_` for the rest. Read off the engine when scraped."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from trivet_chassis.metrics import create_registry

from trivet_scheduler.engine import Engine
from trivet_scheduler.report import load_report
from trivet_scheduler.request import Status

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineCollector(Collector):
    """Gauges and counters out of the engine's own numbers, so that nothing is counted twice."""

    def __init__(self, engine: Engine, num_streams: Callable[[], int]) -> None:
        self._engine = engine
        self._num_streams = num_streams

    def collect(self) -> Iterator[Metric]:
        load, totals = load_report(self._engine), self._engine.totals
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests running", value=load.requests_running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting", value=load.requests_waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", value=load.kv_cache_usage)
        yield CounterMetricFamily("vllm:num_preemptions", "Preemptions", value=load.preemptions_total)
        yield CounterMetricFamily("vllm:prefix_cache_queries", "Tokens looked up", value=load.prefix_cache_queries_total)
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Tokens found", value=load.prefix_cache_hits_total)
        yield CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens admitted", value=load.prompt_tokens_total)
        yield CounterMetricFamily("vllm:generation_tokens", "Tokens generated", value=load.generation_tokens_total)
        yield GaugeMetricFamily("trivet_blocks_in_use", "KV blocks held by requests", value=load.blocks_in_use)
        yield GaugeMetricFamily("trivet_blocks_total", "KV blocks in all", value=load.blocks_total)
        yield GaugeMetricFamily("trivet_waiting_tokens", "Tokens of waiting requests", value=load.waiting_uncached_tokens)
        yield GaugeMetricFamily("trivet_replicas_ready", "Workers ready", value=self._engine.num_replicas)
        yield GaugeMetricFamily("trivet_streams", "Sessions and attachments open", value=self._num_streams())
        yield GaugeMetricFamily("trivet_sessions", "Frontends connected", value=self._engine.num_sessions)
        yield CounterMetricFamily("trivet_steps", "Steps, each iteration of one counted", value=load.steps_total)
        yield CounterMetricFamily("trivet_failed_steps", "Steps that failed", value=self._engine.core.totals.failed_steps)
        yield CounterMetricFamily("trivet_replicas_lost", "Workers lost", value=totals.replicas_lost)
        yield CounterMetricFamily("trivet_requests_requeued", "Requests that lost their worker", value=totals.requests_requeued)
        yield CounterMetricFamily("trivet_stale_messages", "Messages of older epochs, dropped", value=totals.stale_messages)
        finished = CounterMetricFamily("trivet_requests_finished", "Requests ended, by reason", labels=["reason"])
        for status, count in self._engine.core.totals.finished.items():
            finished.add_metric([_reason(status)], count)
        yield finished


def engine_registry(engine: Engine, num_streams: Callable[[], int]) -> CollectorRegistry:
    """`num_streams` says how many sessions and attachments are open."""
    registry = create_registry("scheduler")
    registry.register(EngineCollector(engine, num_streams))
    step_seconds = Histogram("trivet_step_seconds", "From sending a step to its answer", buckets=STEP_BUCKETS, registry=registry)
    step_tokens = Histogram("trivet_step_tokens", "Tokens run in a step", buckets=TOKEN_BUCKETS, registry=registry)

    def observe(seconds: float, tokens: int) -> None:
        step_seconds.observe(seconds)
        step_tokens.observe(tokens)

    engine.observe_step = observe
    return registry


def _reason(status: Status) -> str:
    return status.name.removeprefix("FINISHED_").lower()
