"""What the operator decides about scheduling; the rest are the workers' own limits."""

from dataclasses import dataclass

from trivet_scheduler.queues import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Read once at start."""

    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: no such limit
    watermark: float = 0.01  # share of the blocks that admitting a request leaves free while others run
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4_000_000
    steps_in_flight: int = 2
    run_ahead: int = 1  # most iterations that a worker runs from one step
