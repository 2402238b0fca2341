"""One replica as the core sees it: its KV cache, what runs there, steps in flight, and blocks that wait for a step's answer.

It owns the running list and the handles given to the worker. Blocks of a request that ends while steps still name it are freed when the
last of those steps is answered: until then the worker may write to them.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trivet_scheduler.forecast import StepForecast
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.plan import Flight
from trivet_scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The worker's own settings, on which its memory profile rests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    steps_in_flight: int
    run_ahead: int = 1  # most iterations from one step


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Blocks of a life that has ended, to which steps in flight may still write."""

    last_step: int
    handle: int
    blocks: list[int]


class Replica:
    """State of one attached worker, for one epoch."""

    def __init__(self, name: str, kv: KVCacheCoordinator, limits: ReplicaLimits) -> None:
        self.name = name
        self.kv = kv
        self.limits = limits
        self.running: list[Request] = []
        self.flights: deque[Flight] = deque()
        self.finished_handles: list[int] = []
        self.blocks_to_zero: list[int] = []
        self.resync: int | None = None
        self.token_budget = limits.max_num_batched_tokens  # shrinks after a failed step, recovers with good ones
        self._next_step = 1
        self._next_handle = 1
        self.draining = False  # what runs here goes on, nothing new is admitted
        self.held_back: list[HeldBack] = []
        self.forecast = StepForecast()
        self._distrusted: set[int] = set()
        self._answered_at = -math.inf
        self._slots: NDArray[np.int64] | None = None

    @property
    def slots(self) -> NDArray[np.int64]:
        """Rows of the running requests, in their order; rebuilt only when the list changed."""
        if self._slots is None:
            self._slots = np.fromiter((request.slot for request in self.running), dtype=np.int64, count=len(self.running))
        return self._slots

    def add_running(self, request: Request) -> None:
        self.running.append(request)
        self._slots = None

    def remove_running(self, request: Request) -> None:
        self.running.remove(request)
        self._slots = None

    def next_step(self) -> int:
        number = self._next_step
        self._next_step += 1
        return number

    def next_handle(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    # ---- blocks ----

    def shared_tokens(self, request: Request) -> int:
        """Tokens in the full blocks of its prompt: what its siblings can take over."""
        return (request.num_prompt - 1) // self.kv.block_size * self.kv.block_size

    def free_when_answered(self, request: Request) -> None:
        """Give back its blocks now, or after the last step that names it."""
        blocks, request.block_table = request.block_table, []
        if not blocks:
            return
        if request.steps_in_flight:
            self.held_back.append(HeldBack(request.last_step, request.worker_handle, blocks))
        else:
            self._release(blocks)

    @property
    def runs_ahead(self) -> bool:
        """Its newest step has more than one iteration before it; a step sent now would end that."""
        return bool(self.flights) and self.flights[-1].left > 1

    @property
    def blocks_coming(self) -> int:
        """Blocks that become free by themselves as steps are answered."""
        return sum(len(held.blocks) for held in self.held_back)

    def free_answered(self, step: int) -> None:
        answered = [held for held in self.held_back if held.last_step <= step]
        if answered:
            self.held_back = [held for held in self.held_back if held.last_step > step]
        for held in answered:
            self._release(held.blocks)

    def distrust(self, request: Request, handle: int) -> None:
        """What it computed in that life is not finite: nobody may find its blocks, and they are zeroed once nobody holds them."""
        tables = [held.blocks for held in self.held_back if held.handle == handle]
        if request.worker_handle == handle:
            tables.append(request.block_table)
        for block in (block for table in tables for block in table):
            self.kv.pool.unname(block)
            self._distrusted.add(block)

    def _release(self, blocks: list[int]) -> None:
        self.kv.release(blocks)
        if not self._distrusted:
            return
        # Zero times NaN is NaN: whoever takes these blocks next must not see what is in them. Whoever shares them still reads them.
        freed = [block for block in blocks if block in self._distrusted and self.kv.pool.is_free(block)]
        self._distrusted.difference_update(freed)
        self.blocks_to_zero.extend(freed)

    # ---- time ----

    def note_answer(self, now: float) -> None:
        self._answered_at = now

    def step_age(self, now: float) -> float | None:
        """Seconds that the oldest unanswered step has been running: since it was sent, or since the one before it was answered."""
        return now - max(self.flights[0].sent_at, self._answered_at) if self.flights else None
