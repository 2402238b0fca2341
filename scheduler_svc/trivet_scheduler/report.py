"""What the engine says of itself: the load report for frontends, and how its steps get on."""

from trivet_proto.v1 import engine_pb2

from trivet_scheduler.engine import Engine, ReplicaLink


def load_report(engine: Engine) -> engine_pb2.Load:
    """Queue, KV use, totals: sent to every frontend once a second and when readiness changes, and the source of the metrics."""
    core, pools = engine.core, [link.replica.kv.pool for link in engine.links]
    totals = core.totals
    held, capacity = sum(pool.num_held for pool in pools), sum(pool.capacity for pool in pools)
    report = engine_pb2.Load(
        requests_running=core.num_running,
        requests_waiting=len(core.waiting),
        waiting_uncached_tokens=core.waiting.num_uncached_tokens,
        kv_cache_usage=held / capacity if capacity else 0.0,
        replicas_ready=0 if engine.draining else sum(not link.is_draining for link in engine.links),
        blocks_in_use=held,
        blocks_total=capacity,
        preemptions_total=totals.preemptions,
        prefix_cache_queries_total=totals.prefix_queries,
        prefix_cache_hits_total=totals.prefix_hits,
        steps_total=totals.steps,
        prompt_tokens_total=totals.prompt_tokens,
        generation_tokens_total=totals.generation_tokens,
        paused=core.paused,
    )
    ages = [link.step_age_s for link in engine.links]
    known = [age for age in ages if age is not None]
    if known:
        report.last_step_age_ms = int(max(known) * 1000)
    return report


def step_progress(engine: Engine) -> tuple[bool, float | None]:
    """Whether steps are unanswered, and the age in seconds of the oldest of the replica that is worst off.

    None when that age says nothing: above the floor, but within what this step is given.
    """
    busy = [link for link in engine.links if link.replica.flights]
    if not busy:
        return False, None
    worst = max(busy, key=_lateness)
    age = worst.step_age_s
    if age is not None and engine.settings.step_timeout < age <= worst.step_limit_s:
        return True, None
    return True, age


def _lateness(link: ReplicaLink) -> float:
    return (link.step_age_s or 0.0) / link.step_limit_s
