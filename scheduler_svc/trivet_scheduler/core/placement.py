"""Which replica a waiting request should run on: the one where the resulting load is least.

The load is the tokens still to run there plus those that the request could not reuse there: a cached prefix draws it to its owner until
that would overload the owner, and without prefix caching the load alone decides. A request is bound to a replica only when it starts,
so nothing has to be moved when a replica comes, goes or is slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.kv.coordinator import PrefixHit
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, RequestTable


def capacity_tokens(replicas: Sequence[Replica]) -> int:
    """What one new request can hold at most; 0 without replicas. Those that drain count only when all do."""
    admitting = [replica for replica in replicas if not replica.draining]
    return max((replica.kv.capacity_tokens for replica in admitting or replicas), default=0)


@dataclass(slots=True)
class Room:
    """What one replica can still take on in this step, less what was given or left to it so far."""

    replica: Replica
    seats: int  # requests
    blocks: int  # free beside what the prefills under way still need and the watermark
    load: int  # tokens that run there before a newcomer, those in flight included
    watermark: int  # blocks that stay free once somebody runs there
    empty: bool

    def fits(self, request: Request, hit: PrefixHit) -> bool:
        """Whether all of its tokens so far have a place there now."""
        kv = self.replica.kv
        return self.seats > 0 and kv.cost(hit, kv.blocks_for(request.num_tokens)) <= self.blocks

    def charge(self, request: Request, hit: PrefixHit) -> None:
        """Count it as one of those who run there."""
        kv = self.replica.kv
        self.seats -= 1
        self.blocks -= kv.cost(hit, kv.blocks_for(request.num_tokens)) + (self.watermark if self.empty else 0)
        self.load += request.num_tokens - hit.num_tokens + 1
        self.empty = False


class Placement:
    """Compares replicas. Owns nothing."""

    def __init__(self, settings: CoreSettings, table: RequestTable, prefixes: Prefixes, replicas: Sequence[Replica]) -> None:
        self._settings = settings
        self._table = table
        self._prefixes = prefixes
        self._replicas = replicas

    def rooms_beside(self, replica: Replica) -> list[Room]:
        """The other replicas that admit requests."""
        return [self.room(other) for other in self._replicas if other is not replica and not other.draining]

    def room(self, replica: Replica) -> Room:
        table, slots, kv = self._table, replica.slots, replica.kv
        most = replica.limits.max_num_seqs
        if self._settings.max_num_active_seqs is not None:
            most = min(most, self._settings.max_num_active_seqs)
        watermark = int(self._settings.watermark * kv.pool.capacity)
        room = Room(replica, most, kv.pool.num_free, 0, watermark, empty=True)
        if len(slots):
            tokens = table.tokens[slots]
            whole = -(-tokens // kv.block_size)
            room.seats -= len(slots)
            room.blocks -= int(np.maximum(whole - table.blocks[slots], 0).sum()) + watermark
            room.load = int((tokens - table.durable[slots]).sum()) + len(slots)
            room.empty = False
        return room

    def better(self, here: Room, others: Sequence[Room], request: Request, hit: PrefixHit) -> tuple[Room, PrefixHit] | None:
        """Another replica that can take it now, where the load would be less than here; None when here is best, or nowhere is room."""
        best: tuple[Room, PrefixHit] | None = None
        least = here.load - hit.num_tokens if here.fits(request, hit) else None
        for room in others:
            if room.seats <= 0 or request.num_tokens > room.replica.kv.capacity_tokens:
                continue
            its_hit = self._prefixes.lookup(room.replica, request)
            load = room.load - its_hit.num_tokens
            if (least is None or load < least) and room.fits(request, its_hit):
                best, least = (room, its_hit), load
        return best
