"""The block pool under random fire, against a plain model of it: a count of references and a name per block."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trivet_scheduler.kv.block_pool import NULL_BLOCK, BlockPool


def pool_state(pool: BlockPool) -> tuple[object, ...]:
    """All that a pool knows, for comparing."""
    return list(pool._references), list(pool._hashes), list(pool._next), pool.num_free


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables of held blocks, and what each named block is called."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.names: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        held, before = self.held(), pool_state(self.pool)
        taken = self.pool.take(count)
        if count > self.pool.capacity - len(held):
            assert taken is None
            assert pool_state(self.pool) == before, "a refusal changes nothing"
            return
        assert taken is not None
        assert len(set(taken)) == count
        assert not held & set(taken)
        assert NULL_BLOCK not in taken
        for block in taken:
            self.names.pop(block, None)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 50))
    def release(self, index: int) -> None:
        self.pool.release(self.tables.pop(index % len(self.tables)))

    @precondition(lambda self: self.held())
    @rule(index=st.integers(0, 50), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def name(self, index: int, name: bytes) -> None:
        held = sorted(self.held())
        block = held[index % len(held)]
        self.pool.name(block, name)
        self.names.setdefault(block, name)

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, name: bytes) -> None:
        block = self.pool.find(name)
        assert (block is not None) == (name in self.names.values())
        if block is not None:
            assert self.names[block] == name
            self.pool.hold([block])
            self.tables.append([block])

    @precondition(lambda self: self.names)
    @rule(index=st.integers(0, 50))
    def unname(self, index: int) -> None:
        block = sorted(self.names)[index % len(self.names)]
        self.pool.unname(block)
        del self.names[block]

    @rule()
    def unname_all(self) -> None:
        assert self.pool.unname_all() == len(self.names)
        self.names.clear()

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_held == len(self.held())
        assert all(self.pool.is_free(block) == (block not in self.held()) for block in range(1, self.pool.num_blocks))
