"""What the runner's buffers are made for; the scheduler is told and keeps to it."""

from dataclasses import dataclass

MOST_ITERATIONS = 64
"""That a worker runs from one step. What is saved by more of them can't be measured."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Requests, tokens a step, tokens a request, tokens a block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
