"""The order in which the block pool gives blocks out again, and several blocks of one content."""

from trivet_scheduler.kv.block_pool import BlockPool


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
