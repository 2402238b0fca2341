"""What those who run get in the next step of their replica: tokens within its budget, and the blocks that these need.

When blocks are short the last in rank give theirs up, so that the first always goes on. Who outgrows the replica itself leaves it for a
larger one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.plan import Ints
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Requests that the worker knows and that have something to run: tokens and new blocks of each."""

    requests: list[Request]
    counts: Ints
    new_blocks: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


NOBODY = KnownRows([], np.zeros(0, dtype=np.int32), [])


class Growth:
    """Changes block tables, and by preempting the book. Owns nothing."""

    def __init__(self, settings: CoreSettings, book: RequestBook) -> None:
        self._settings = settings
        self._book = book

    def part_with_outgrown(self, replica: Replica) -> None:
        """Whose newest token has no place there leaves for a larger replica; without one that token would have been the last."""
        for index in np.flatnonzero(self._book.table.tokens[replica.slots] > replica.kv.capacity_tokens)[::-1]:
            self._book.preempt(replica.running[index])

    def grow(self, replica: Replica) -> KnownRows:
        """Tokens and blocks for the next step of those who run there."""
        if not replica.running:
            return NOBODY
        table, slots = self._book.table, replica.slots
        tokens, computed = table.tokens[slots], table.computed[slots]
        known = tokens + table.pending[slots]
        # At its limit with tokens in flight a request has nothing more to run, nor has one that fills the replica.
        counts = np.where((known >= table.limit[slots]) & (computed >= tokens), 0, known - computed)
        counts = np.minimum(counts, replica.kv.capacity_tokens - computed)
        counts = self._within_budget(counts, replica.token_budget)
        needed = np.maximum(-(-(computed + counts) // replica.kv.block_size) - table.blocks[slots], 0)
        needed[counts == 0] = 0
        running = list(replica.running)
        fresh: dict[Request, list[int]] = {}
        if int(needed.sum()) <= replica.kv.pool.num_free:
            for index in np.flatnonzero(needed):
                self._give(replica, running[index], int(needed[index]), fresh)
        else:
            kept = self._give_by_preempting(replica, running, counts, needed, fresh)
            running = [running[index] for index in kept]
            counts = counts[kept]
        rows = np.flatnonzero(counts)
        requests = [running[index] for index in rows]
        return KnownRows(requests, counts[rows].astype(np.int32), [fresh.get(request, []) for request in requests])

    def _within_budget(self, counts: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
        """Clamp to the long-prefill threshold and the token budget. Decodes come first, so that no prefill can stall a running stream."""
        threshold = self._settings.long_prefill_token_threshold
        if threshold and len(counts) > 1:
            counts = np.minimum(counts, threshold)
        if int(counts.sum()) <= budget:
            return counts
        order = np.argsort(counts > 1, kind="stable")
        ordered = counts[order]
        before = np.cumsum(ordered) - ordered
        clamped = np.empty_like(counts)
        clamped[order] = np.clip(budget - before, 0, ordered)
        return clamped

    def _give(self, replica: Replica, request: Request, count: int, fresh: dict[Request, list[int]]) -> None:
        blocks = replica.kv.grow(request.block_table, count)
        assert blocks is not None, "counted before"
        self._book.table.blocks[request.slot] += count
        fresh[request] = blocks

    def _give_by_preempting(
        self,
        replica: Replica,
        running: list[Request],
        counts: NDArray[np.int32],
        needed: NDArray[np.int32],
        fresh: dict[Request, list[int]],
    ) -> NDArray[np.int64]:
        """Give blocks in the order of rank, preempting from the other end. Returns the indices of those who still run."""
        order = sorted(range(len(running)), key=lambda index: self._book.waiting.rank(running[index]))
        victims = list(reversed(order))
        alive = dict.fromkeys(range(len(running)))
        pool = replica.kv.pool
        for index in order:
            if index not in alive or counts[index] == 0:
                continue
            while pool.num_free + replica.blocks_coming < needed[index]:
                victim = victims.pop(0)
                while victim not in alive:
                    victim = victims.pop(0)
                # Whatever this step gave the victim goes back with its table.
                fresh.pop(running[victim], None)
                counts[victim] = 0
                del alive[victim]
                self._book.preempt(running[victim])
                if victim == index:
                    break
            if index not in alive:
                continue
            if pool.num_free < needed[index]:
                counts[index] = 0  # enough is coming: it waits for a step's answer
            elif needed[index]:
                self._give(replica, running[index], int(needed[index]), fresh)
        return np.fromiter(alive, dtype=np.int64, count=len(alive))
