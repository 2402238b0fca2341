"""What one group of layers asks of the block pool: which cached blocks a prompt can use, how many blocks a length needs, what to name.

A manager owns no blocks: tables belong to requests, states to the pool.
"""

from collections.abc import Sequence
from typing import Protocol

from trivet_scheduler.kv.block_pool import BlockPool
from trivet_scheduler.kv.hashing import group_key
from trivet_scheduler.kv.specs import FullAttentionSpec, KVCacheSpec


class KVCacheManager(Protocol):
    """One group's rules. `group` is its number in the replica's configuration."""

    spec: KVCacheSpec
    group: int

    def hits(self, chain: Sequence[bytes], most_blocks: int) -> list[int]:
        """Cached blocks of the longest usable prefix of a hash chain, at most so many; nothing is held by this."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of the block table that `num_tokens` need."""
        ...

    def name(self, table: Sequence[int], chain: Sequence[bytes], first: int, last: int) -> None:
        """Let the full blocks [first, last) of a table be found."""
        ...


class FullAttentionManager:
    """Every token stays, so a prefix is usable as far as its blocks are there without a gap."""

    def __init__(self, spec: KVCacheSpec, group: int, pool: BlockPool) -> None:
        assert isinstance(spec, FullAttentionSpec), spec
        self.spec: KVCacheSpec = spec
        self.group = group
        self._pool = pool

    def hits(self, chain: Sequence[bytes], most_blocks: int) -> list[int]:
        found = []
        for block_hash in chain[:most_blocks]:
            block = self._pool.find(group_key(block_hash, self.group))
            if block is None:
                break
            found.append(block)
        return found

    def blocks_for(self, num_tokens: int) -> int:
        return self.spec.blocks_for(num_tokens)

    def name(self, table: Sequence[int], chain: Sequence[bytes], first: int, last: int) -> None:
        for index in range(first, last):
            self._pool.name(table[index], group_key(chain[index], self.group))
