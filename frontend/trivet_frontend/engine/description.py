"""What a scheduler says of itself: the model that it serves and the load that it carries.

Both are plain, frozen values, replaced as a whole by each report. Nobody computes them here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The model behind a scheduler, as far as a frontend must know it."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    bundle_digest: bytes
    max_logprobs: int
    generates: bool
    tasks: tuple[str, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One load report; totals count since the scheduler started."""

    requests_running: int = 0
    requests_waiting: int = 0
    waiting_uncached_tokens: int = 0
    kv_cache_usage: float = 0.0
    replicas_ready: int = 0
    blocks_in_use: int = 0
    blocks_total: int = 0
    preemptions_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    # None without work.
    last_step_age_ms: int | None = None
    paused: bool = False
