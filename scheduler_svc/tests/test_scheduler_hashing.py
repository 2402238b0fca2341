"""Prefix hashes: what makes two blocks the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trivet_scheduler.kv.hashing import HashKeys, coarser_chain, extend_chain, group_key

SIZE = 4
PLAIN = HashKeys()


def chain_of(ids: list[int], keys: HashKeys = PLAIN) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, np.array(ids, dtype=np.int32), SIZE, keys)
    return chain


@given(ids=st.lists(st.integers(0, 50), max_size=40), cut=st.integers(0, 40))
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(ids: list[int], cut: int) -> None:
    chain = chain_of(ids[:cut])
    extend_chain(chain, np.array(ids[len(chain) * SIZE :], dtype=np.int32), SIZE, HashKeys())
    assert chain == chain_of(ids)
    assert len(chain) == len(ids) // SIZE


def test_a_block_stands_for_all_that_came_before_it() -> None:
    one, other = chain_of([1] * 12), chain_of([2] + [1] * 11)
    assert not set(one) & set(other)
    assert chain_of([1] * 12)[:2] == chain_of([1] * 8 + [9] * 4)[:2]


def test_salt_adapter_and_group_keep_blocks_apart() -> None:
    ids = [1] * 8
    chains = [chain_of(ids, keys) for keys in (HashKeys(), HashKeys(salt=b"a"), HashKeys(salt=b"b"), HashKeys(adapter=b"a"))]
    assert len({block for chain in chains for block in chain}) == 8
    assert group_key(chains[0][0], 0) != group_key(chains[0][0], 1)


def test_a_coarser_chain_has_the_hashes_at_which_its_blocks_end() -> None:
    chain = chain_of(list(range(20)))
    assert coarser_chain(chain, 2) == [chain[1], chain[3]]
