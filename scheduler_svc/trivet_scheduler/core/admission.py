"""From waiting to running: who starts in the next step of a replica.

In strict order, so that nobody is passed over for being large. With several replicas a request may be left to another where it would run
sooner, keeping its place in the queue; but not for longer than `PATIENCE_S`, should the other be stuck.
"""

from collections.abc import Sequence

from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.intake import too_long
from trivet_scheduler.core.placement import Placement, Room, capacity_tokens
from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.kv.coordinator import PrefixHit
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

PATIENCE_S = 1.0
MOST_LEFT = 32  # requests that a step leaves to other replicas; it looks no further, so that a long queue costs no time


class Admission:
    """Moves requests from the queue to replicas. Owns nothing."""

    def __init__(
        self, settings: CoreSettings, book: RequestBook, prefixes: Prefixes, placement: Placement, replicas: Sequence[Replica]
    ) -> None:
        self._settings = settings
        self._book = book
        self._prefixes = prefixes
        self._placement = placement
        self._replicas = replicas

    def admit(self, replica: Replica, budget: int) -> list[tuple[Request, int]]:
        """Those who start there, with the tokens of their first step; at most `budget` tokens in all."""
        waiting = self._book.waiting
        if replica.draining or budget <= 0 or not len(waiting):
            return []
        here = self._placement.room(replica)
        others: list[Room] | None = None  # most steps have no seat to give, and need not look around
        admitted: list[tuple[Request, int]] = []
        left: list[Request] = []
        while budget > 0 and here.seats > 0 and len(left) < MOST_LEFT:
            request = waiting.peek()
            if request is None:
                break
            if self._is_blocked(replica, request):
                waiting.block(request)
                continue
            if request.num_tokens > capacity_tokens(self._replicas):
                self._end_too_long(request)
                continue
            if request.num_tokens > replica.kv.capacity_tokens:
                waiting.block(request)
                left.append(request)
                continue
            hit = self._prefixes.lookup(replica, request)
            others = self._placement.rooms_beside(replica) if others is None else others
            better = self._placement.better(here, others, request, hit) if others else None
            if better is not None and self._has_patience(request):
                better[0].charge(request, better[1])
                waiting.block(request)
                left.append(request)
                continue
            if not here.fits(request, hit):
                break
            here.charge(request, hit)
            count = self._start(replica, request, hit, budget)
            budget -= count
            admitted.append((request, count))
        for request in left:
            waiting.unblock(request)
        return admitted

    def _start(self, replica: Replica, request: Request, hit: PrefixHit, budget: int) -> int:
        """Give it its first blocks; returns the tokens of its first step."""
        book, kv, slot = self._book, replica.kv, request.slot
        count = min(request.num_tokens - hit.num_tokens, budget)
        threshold = self._settings.long_prefill_token_threshold
        if threshold and replica.running:
            count = min(count, threshold)
        total = kv.blocks_for(hit.num_tokens + count)
        blocks = kv.allocate(hit, total)
        assert blocks is not None, "there was room"
        request.block_table = blocks
        request.named_blocks = len(hit.blocks)
        request.left_since = None
        book.table.blocks[slot] = total
        book.table.computed[slot] = book.table.durable[slot] = hit.num_tokens
        if request.cached_tokens is None:
            request.cached_tokens = hit.num_tokens
            book.totals.prefix_queries += request.num_tokens
            book.totals.prefix_hits += hit.num_tokens
        book.start(request, replica)
        return count

    def _is_blocked(self, replica: Replica, request: Request) -> bool:
        if request.steps_in_flight:
            return True  # tokens of its former life are on their way: they come first
        return self._book.waits_for_sibling(request) and replica.shared_tokens(request) > 0

    def _has_patience(self, request: Request) -> bool:
        now = self._book.clock.monotonic()
        if request.left_since is None:
            request.left_since = now
        return now - request.left_since < PATIENCE_S

    def _end_too_long(self, request: Request) -> None:
        """It came before any replica had said its size, or it outgrew the largest that is left."""
        if request.output:
            self._book.finish(request, Status.FINISHED_LENGTH)
        else:
            self._book.fail(request, too_long(request.num_tokens, self._replicas))
