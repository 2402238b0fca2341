"""One replica as the core sees it: its KV cache, what runs there, steps in flight, and blocks that wait for a step's answer.

It owns the running list and the handles given to the worker. Blocks of a request that ends while steps still name it are freed when the
last of those steps is answered: until then the worker may write to them.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        self._held_back: deque[tuple[int, list[int]]] = deque()  # (step, blocks), ascending
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

    def free_when_answered(self, request: Request) -> None:
        """Give back its blocks now, or after the last step that names it."""
        blocks, request.block_table = request.block_table, []
        if not blocks:
            return
        if request.steps_in_flight:
            self._held_back.append((request.last_step, blocks))
        else:
            self.kv.release(blocks)

    @property
    def blocks_coming(self) -> int:
        """Blocks that become free by themselves as steps are answered."""
        return sum(len(blocks) for _, blocks in self._held_back)

    def free_answered(self, step: int) -> None:
        still: deque[tuple[int, list[int]]] = deque()
        for last_step, blocks in self._held_back:
            if last_step <= step:
                self.kv.release(blocks)
            else:
                still.append((last_step, blocks))
        self._held_back = still
