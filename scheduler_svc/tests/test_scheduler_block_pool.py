"""The block pool against a plain model of it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trivet_scheduler.kv.block_pool import NULL_BLOCK, BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: a count of references and a name per block."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.names: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        held, free = self.held(), self.pool.num_free
        taken = self.pool.take(count)
        if count > free:
            assert taken is None
            assert self.pool.num_free == free
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


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBlockPoolAgainstAModel = BlockPoolMachine.TestCase


def test_unnamed_blocks_are_reused_last_in_first_out_and_named_ones_least_recently_used_first() -> None:
    pool = BlockPool(6)
    first, second, third, fourth, fifth = pool.take(5)
    for block, name in ((first, b"1"), (second, b"2")):
        pool.name(block, name)
    pool.release([second])
    pool.release([first])
    pool.release([third])
    pool.release([fourth])
    assert pool.take(4) == [fourth, third, second, first]
    assert pool.find(b"1") is None
    pool.release([fifth])


def test_several_blocks_of_one_content_are_found_until_the_last_is_gone() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    for block in taken:
        pool.name(block, b"x")
    for block in taken:
        assert pool.find(b"x") in taken
        pool.unname(block)
    assert pool.find(b"x") is None
