"""Arrays and seeds mean the same on both ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_f32, pack_i32, pack_u32, split_ragged, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.revision import LEAST_REVISION, REVISION, agree
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import types_pb2

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_int32_arrays_are_the_same_after_the_wire(values: list[int]) -> None:
    assert unpack_i32(pack_i32(values)).tolist() == values


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_uint32_arrays_are_the_same_after_the_wire(values: list[int]) -> None:
    assert unpack_u32(pack_u32(values)).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_arrays_are_the_same_after_the_wire(values: list[float]) -> None:
    assert unpack_f32(pack_f32(values)).tolist() == values


def test_arrays_are_little_endian() -> None:
    assert pack_i32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def test_a_torn_array_is_refused_by_name() -> None:
    with pytest.raises(TrivetError, match="block_ids: 5 bytes"):
        unpack_i32(b"12345", "block_ids")


@given(st.lists(st.lists(int32, max_size=5), max_size=8))
def test_ragged_arrays_come_apart_as_they_were(rows: list[list[int]]) -> None:
    values = np.array([value for row in rows for value in row], dtype=np.int32)
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    assert [row.tolist() for row in split_ragged(values, counts)] == rows


@pytest.mark.parametrize("counts", [[1, 3], [-1, 4], [0, 0]])
def test_counts_that_do_not_fit_the_values_are_refused(counts: list[int]) -> None:
    with pytest.raises(TrivetError, match="counts add up"):
        split_ragged(np.arange(3, dtype=np.int32), np.array(counts, dtype=np.int32))


@given(st.integers(0, 2**64 - 1))
def test_child_seeds_differ_and_the_first_is_the_seed_itself(seed: int) -> None:
    seeds = [child_seed(seed, index) for index in range(64)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 64
    assert all(0 <= value < 2**64 for value in seeds)


def test_revisions_agree_or_say_who_must_upgrade() -> None:
    assert agree(types_pb2.Schema(revision=REVISION + 1, least_revision=REVISION)) is None
    assert "upgrade the peer" in (agree(types_pb2.Schema(revision=LEAST_REVISION - 1)) or "")
    assert "upgrade this service" in (agree(types_pb2.Schema(revision=REVISION + 2, least_revision=REVISION + 1)) or "")
