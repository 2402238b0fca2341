"""The blocks of one replica: who holds them, which are free, and which can be found by a prefix hash.

Every block is in exactly one of three states: *held* (reference count > 0), *cached* (free, but its content can be found by hash) or
*free*. Cached and free blocks stand in one doubly linked queue, kept in two integer lists: blocks without a hash enter at its head
(reused last in, first out: they are warm in the processor's caches), hashed ones at its tail (evicted least recently used first).
Block 0 is the null block: it is never given out. Every operation takes constant time per block; a refused one changes nothing.
"""

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` counts the null block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Links of the queue; the null block is its sentinel, so head and tail need no special case.
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self._previous = [(block - 1) % num_blocks for block in range(num_blocks)]
        self._num_free = num_blocks - 1
        # Nearly every hash names one block; several only when requests computed the same content side by side.
        self._by_hash: dict[bytes, int | dict[int, None]] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be given out in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        return self._num_free

    @property
    def num_held(self) -> int:
        return self.capacity - self._num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return self.num_held / self.capacity

    def find(self, block_hash: bytes) -> int | None:
        """A block with that content."""
        found = self._by_hash.get(block_hash)
        return next(iter(found)) if isinstance(found, dict) else found

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def take(self, count: int) -> list[int] | None:
        """`count` new blocks, each with one reference; None, and nothing changed, when there are not so many."""
        if count > self._num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._forget_hash(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each; a free one leaves the queue."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each. The last ones of a sequence are to be evicted first, so pass them in reading order."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._enqueue(block)

    def name(self, block: int, block_hash: bytes) -> None:
        """Let a held, full block be found by its content."""
        assert self._references[block] > 0, f"block {block} is named but not held"
        if self._hashes[block] is not None:
            return
        self._hashes[block] = block_hash
        present = self._by_hash.get(block_hash)
        if present is None:
            self._by_hash[block_hash] = block
        elif isinstance(present, dict):
            present[block] = None
        else:
            self._by_hash[block_hash] = {present: None, block: None}

    def unname(self, block: int) -> None:
        """Its content is no longer what its hash says. A free block moves to where free ones are reused first."""
        if self._hashes[block] is None:
            return
        self._forget_hash(block)
        if self._references[block] == 0:
            self._unlink(block)
            self._enqueue(block)

    def unname_all(self) -> int:
        """Forget every hash; returns how many blocks had one."""
        named = [block for block, block_hash in enumerate(self._hashes) if block_hash is not None]
        for block in named:
            self.unname(block)
        return len(named)

    def check(self) -> None:
        """Assert that every block is in exactly one state. Linear; for tests and idle moments."""
        queue, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            queue.append(block)
            assert self._previous[self._next[block]] == block
            block = self._next[block]
        free = set(queue)
        assert len(queue) == len(free) == self._num_free
        for block in range(1, self.num_blocks):
            assert (self._references[block] == 0) == (block in free), block
        assert self._references[NULL_BLOCK] == 0
        named = {block for found in self._by_hash.values() for block in (found if isinstance(found, dict) else (found,))}
        assert named == {block for block, block_hash in enumerate(self._hashes) if block_hash is not None}

    # ---- the queue ----

    def _enqueue(self, block: int) -> None:
        if self._hashes[block] is None:
            self._link_after(NULL_BLOCK, block)
        else:
            self._link_after(self._previous[NULL_BLOCK], block)

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._hashes[block] = None
        present = self._by_hash[block_hash]
        if not isinstance(present, dict):
            del self._by_hash[block_hash]
            return
        del present[block]
        if len(present) == 1:
            self._by_hash[block_hash] = next(iter(present))
