"""All groups of one replica behind one face: prefix lookup, `allocate_slots`, naming of finished blocks, release.

It owns the pool and the managers; block tables belong to requests. `allocate` is all or nothing: a refusal changes no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trivet_scheduler.kv.block_pool import BlockPool
from trivet_scheduler.kv.memory import KVCacheConfig
from trivet_scheduler.kv.registry import ManagerRegistry


@dataclass(slots=True)
class PrefixHit:
    """Cached blocks that a request could start on."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_unheld: int = 0  # of the blocks, at the time of the lookup: they count among the free ones


class KVCacheCoordinator:
    """The KV cache of one replica."""

    def __init__(self, config: KVCacheConfig, registry: ManagerRegistry) -> None:
        assert len(config.groups) == 1, "one block table"
        self.pool = BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self._manager = registry.find(type(config.groups[0].spec))(config.groups[0].spec, 0, self.pool)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values one request can hold when it is alone."""
        return self.pool.capacity * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return self._manager.blocks_for(num_tokens)

    def lookup(self, chain: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest cached prefix of a request with `num_tokens` tokens; at least one token is left to run, for its logits."""
        blocks = self._manager.hits(chain, max(0, num_tokens - 1) // self.block_size)
        return PrefixHit(blocks, len(blocks) * self.block_size, sum(map(self.pool.is_free, blocks)))

    def cost(self, hit: PrefixHit, total_blocks: int) -> int:
        """Free blocks that a block table of `total_blocks` takes: new ones, and those of the hit that nobody holds."""
        return total_blocks - len(hit.blocks) + hit.num_unheld

    def allocate(self, hit: PrefixHit, total_blocks: int) -> list[int] | None:
        """A block table of `total_blocks` that begins with the hit; None, and nothing changed, when the blocks do not suffice.

        The pool must not have changed since the lookup."""
        if self.cost(hit, total_blocks) > self.pool.num_free:
            return None
        self.pool.hold(hit.blocks)
        fresh = self.pool.take(total_blocks - len(hit.blocks))
        assert fresh is not None, "counted above"
        return [*hit.blocks, *fresh]

    def grow(self, table: list[int], count: int) -> list[int] | None:
        """`count` more blocks at the table's end; None, and nothing changed, when they are not there."""
        fresh = self.pool.take(count)
        if fresh is not None:
            table.extend(fresh)
        return fresh

    def name(self, table: Sequence[int], chain: Sequence[bytes], first: int, last: int) -> None:
        """The blocks [first, last) of a table are full and written for good: let them be found."""
        self._manager.name(table, chain, first, last)

    def release(self, table: Sequence[int]) -> None:
        self.pool.release(table)

    def reset(self) -> int:
        """Forget all cached prefixes; returns how many blocks had one."""
        return self.pool.unname_all()
