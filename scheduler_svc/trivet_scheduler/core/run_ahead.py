"""How many iterations a worker may run from one step without being told anew.

A step of nothing but decodes is followed by one like it, as long as nobody comes or goes. Then the worker can go on by itself, and
scheduler and link have nothing to do for it but to pass tokens on. It stops as soon as another step reaches it, so news waits for one
iteration at most.
"""

import numpy as np

from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.growth import KnownRows
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.replica import Replica


class RunAhead:
    """Gives blocks ahead. Owns nothing."""

    def __init__(self, settings: CoreSettings, book: RequestBook) -> None:
        self._settings = settings
        self._book = book

    def is_offered(self, replica: Replica) -> bool:
        """The worker can, and can be told to stop: a step that ends another is a second one in flight."""
        return min(self._settings.run_ahead, replica.limits.run_ahead) > 1 and replica.limits.steps_in_flight > 1

    def iterations(self, replica: Replica, known: KnownRows) -> int:
        """For a step of these rows alone, which have their blocks for one iteration; those for the others are given here."""
        if not self.is_offered(replica) or replica.runs_ahead or not self._decodes_alone(replica, known):
            return 1
        table, slots = self._book.table, replica.slots
        computed, blocks, block_size = table.computed[slots], table.blocks[slots], replica.kv.block_size
        # To nobody's limit and not beyond: with its last token a request ends, and the step after this one is without it.
        left = int(np.minimum(table.limit[slots] - table.tokens[slots] - table.pending[slots], replica.kv.capacity_tokens - computed).min())
        count = min(self._settings.run_ahead, replica.limits.run_ahead, left)
        if count <= 1:
            return 1
        needed = np.maximum(-(-(computed + count) // block_size) - blocks, 0)
        if int(needed.sum()) > replica.kv.pool.num_free:
            return max(1, min(count, int((blocks * block_size - computed).min())))  # as far as the blocks in hand go
        for row in np.flatnonzero(needed).tolist():
            fresh = replica.kv.grow(replica.running[row].block_table, int(needed[row]))
            assert fresh is not None, "counted before"
            table.blocks[slots[row]] += needed[row]
            known.new_blocks[row] += fresh
        return count

    def _decodes_alone(self, replica: Replica, known: KnownRows) -> bool:
        """Everybody who runs there takes part, and each row gives a token."""
        if not known.requests or len(known.requests) != len(replica.running) or bool((known.counts != 1).any()):
            return False
        table, slots = self._book.table, replica.slots
        reaches_its_end = table.computed[slots] + 1 == table.tokens[slots] + table.pending[slots]
        return bool((reaches_its_end & (table.limit[slots] > table.prompt[slots])).all())
