"""A step's answer in parts is the answer in one piece."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32
from trivet_proto.v1 import types_pb2, worker_pb2
from trivet_scheduler.replicas.result_parts import ResultParts


def answer(rows: range, *, flagged: int | None = None) -> worker_pb2.StepResult:
    """Odd rows have two tokens with logprobs, even ones have none."""
    odd = [row for row in rows if row % 2]
    tokens = [10 * row + index for row in odd for index in range(2)]
    result = worker_pb2.StepResult(
        step=3,
        status=worker_pb2.STEP_STATUS_DONE,
        handles=pack_u32(list(rows)),
        token_counts=pack_i32([2 * (row % 2) for row in rows]),
        token_ids=pack_i32(tokens),
        logprob_rows=pack_i32([row - rows.start for row in odd]),
        prompt_logprobs=[worker_pb2.PromptLogprobChunk(handle=row, first_position=1) for row in rows],
    )
    if flagged in rows:
        result.flags = pack_u8([int(row == flagged) for row in rows])
    if odd:
        result.logprobs.counts, result.logprobs.token_ids = pack_i32([1] * len(tokens)), pack_i32(tokens)
        result.logprobs.values, result.logprobs.ranks = pack_f32(tokens), pack_i32([1] * len(tokens))
    return result


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 20))
def test_any_split_by_rows_joins_to_the_whole(sizes: list[int], flagged: int) -> None:
    ends = np.cumsum([0, *sizes]).tolist()
    parts = ResultParts()
    for index, (start, end) in enumerate(pairwise(ends)):
        piece = answer(range(start, end), flagged=flagged)
        piece.part.index, piece.part.count = index, len(sizes)
        whole = parts.join(piece)
        assert (whole is None) is (index + 1 < len(sizes))
    assert whole == answer(range(ends[-1]), flagged=flagged)


def test_an_answer_in_one_piece_is_left_as_it_is() -> None:
    result = answer(range(3))
    assert ResultParts().join(result) is result


@pytest.mark.parametrize("numbers", [[(1, 2)], [(0, 3), (2, 3)], [(0, 2), (1, 3)], [(0, 0)], [(0, 2), (0, 2)]])
def test_parts_out_of_order_are_refused(numbers: list[tuple[int, int]]) -> None:
    parts = ResultParts()
    pieces = []
    for index, count in numbers:
        pieces.append(answer(range(2)))
        pieces[-1].part.CopyFrom(types_pb2.Part(index=index, count=count))
    for piece in pieces[:-1]:
        parts.join(piece)
    with pytest.raises(TrivetError, match="is due"):
        parts.join(pieces[-1])


def test_another_step_between_parts_is_refused() -> None:
    parts, first = ResultParts(), answer(range(2))
    first.part.count = 2
    parts.join(first)
    with pytest.raises(TrivetError, match="between the parts"):
        parts.join(answer(range(2)))


def test_parts_without_end_are_refused() -> None:
    parts = ResultParts()

    def endless() -> None:
        for index in range(1000):
            piece = worker_pb2.StepResult(
                step=1, token_ids=bytes(MAX_STREAM_MESSAGE_BYTES - 100), part=types_pb2.Part(index=index, count=1000)
            )
            parts.join(piece)

    with pytest.raises(TrivetError) as refused:
        endless()
    assert refused.value.kind is ErrorKind.TOO_LARGE
