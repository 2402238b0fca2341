"""What waits for one frontend: merged while it does not read, never in a message too large, one finish for each handle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_worker import make_spec
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, unpack_f32, unpack_i32, unpack_u8, unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2
from trivet_scheduler.plan import Delta, LogprobArrays
from trivet_scheduler.request import Request, RequestTable, Status
from trivet_scheduler.rpc.outbox import Outbox

TOP = 21


def a_request(handle: int) -> Request:
    table = RequestTable()
    return Request(make_spec([1, 2, 3]), None, handle, 0, 0, table, table.take_slot(), arrival=handle, arrived_at=0.0)


def logprobs_of(tokens: list[int]) -> LogprobArrays:
    count = len(tokens)
    ids = np.repeat(np.array(tokens, dtype=np.int32), TOP)
    return LogprobArrays(np.full(count, TOP, dtype=np.int32), ids, -ids.astype(np.float32), np.array(tokens, dtype=np.int32))


class Reader:
    """Puts together what came."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.timed: dict[int, int] = {}
        self.finishes: dict[int, int] = {}
        self.prompt_positions: list[int] = []

    def read(self, outputs: engine_pb2.StepOutputs) -> None:
        assert outputs.ByteSize() <= MAX_STREAM_MESSAGE_BYTES
        self.prompt_positions += [chunk.first_position for chunk in outputs.prompt_logprobs]
        handles, counts = unpack_u32(outputs.handles).tolist(), unpack_i32(outputs.token_counts).tolist()
        assert len(set(handles)) == len(handles), "one row for each handle"
        ids, rows = unpack_i32(outputs.token_ids).tolist(), unpack_i32(outputs.logprob_rows).tolist()
        ranks, values = unpack_i32(outputs.logprobs.ranks).tolist(), unpack_f32(outputs.logprobs.values)
        assert len(values) == TOP * len(ranks)
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            assert handle not in self.finishes, "nothing comes after the finish"
            self.tokens.setdefault(handle, []).extend(ids[:count])
            ids = ids[count:]
            if row in rows:
                self.scored.setdefault(handle, []).extend(ranks[:count])
                ranks = ranks[count:]
        for row, count in zip(unpack_i32(outputs.first_rows).tolist(), unpack_i32(outputs.cached_tokens).tolist(), strict=True):
            assert handles[row] not in self.cached
            self.cached[handles[row]] = count
        for row, queued in zip(unpack_i32(outputs.timing.rows).tolist(), unpack_i32(outputs.timing.queued_us).tolist(), strict=True):
            self.timed[handles[row]] = queued
        for handle, finish in zip(handles, unpack_u8(outputs.finish_reasons).tolist(), strict=True):
            if finish:
                self.finishes[handle] = finish


async def read_all(outbox: Outbox, reader: Reader) -> int:
    """Read until a load report, which comes last."""
    outbox.put_load(engine_pb2.Load())
    messages = 0
    while not (message := await outbox.next()).HasField("load"):
        reader.read(message.outputs)
        messages += 1
    return messages


@pytest.mark.parametrize("num_tokens", [1, 1000, 8000])
async def test_a_row_too_long_for_a_message_goes_in_pieces_with_its_finish_last(num_tokens: int) -> None:
    outbox, reader, request = Outbox(), Reader(), a_request(7)
    tokens = list(range(num_tokens))
    for start in range(0, num_tokens, 100):
        some = tokens[start : start + 100]
        outbox.put_delta(Delta(request, token_ids=some, logprobs=logprobs_of(some), cached_tokens=None if start else 2, timing=(5, 6)))
    outbox.put_delta(Delta(request, finish=Status.FINISHED_LENGTH))
    messages = await read_all(outbox, reader)
    assert reader.tokens[7] == reader.scored[7] == tokens
    assert reader.finishes == {7: types_pb2.FINISH_REASON_LENGTH}
    assert (reader.cached, reader.timed) == ({7: 2}, {7: 5})
    assert messages == (3 if num_tokens == 8000 else 1)


async def test_prompt_logprobs_go_ahead_of_the_finish_in_as_many_messages_as_they_need() -> None:
    outbox, reader, request = Outbox(), Reader(), a_request(7)
    chunk = types_pb2.Logprobs(counts=pack_i32([TOP] * 2000), token_ids=bytes(4 * TOP * 2000), values=pack_f32([0.0] * TOP * 2000))
    for index in range(5):
        outbox.put_delta(Delta(request, prompt_logprobs=[(1 + 2000 * index, chunk)]))
    outbox.put_delta(Delta(request, finish=Status.FINISHED_STOPPED))
    assert await read_all(outbox, reader) == 6
    assert reader.prompt_positions == [1, 2001, 4001, 6001, 8001]
    assert reader.finishes == {7: types_pb2.FINISH_REASON_STOP}


async def test_nothing_more_is_said_of_a_handle_that_is_forgotten() -> None:
    outbox, reader, request = Outbox(), Reader(), a_request(7)
    outbox.put_delta(Delta(request, token_ids=[1], prompt_logprobs=[(1, types_pb2.Logprobs())]))
    outbox.put_error(8, TrivetError(ErrorKind.INVALID_ARGUMENT, "no"))
    outbox.forget(7)
    assert await read_all(outbox, reader) == 1
    assert set(reader.tokens) == {8}
    assert not reader.prompt_positions


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3000), st.booleans()), max_size=30))
async def test_whatever_merges_comes_out_in_order_and_once(puts: list[tuple[int, int, bool]]) -> None:
    outbox, reader = Outbox(), Reader()
    requests = {handle: a_request(handle) for handle in range(1, 6)}
    expected: dict[int, list[int]] = {}
    for handle, count, read_between in puts:
        sent = expected.setdefault(handle, [])
        tokens = list(range(len(sent), len(sent) + count))
        sent.extend(tokens)
        outbox.put_delta(Delta(requests[handle], token_ids=tokens, logprobs=logprobs_of(tokens) if handle % 2 and tokens else None))
        if read_between:
            await read_all(outbox, reader)
    for handle in expected:
        outbox.put_delta(Delta(requests[handle], finish=Status.FINISHED_LENGTH))
    await read_all(outbox, reader)
    assert reader.tokens == expected
    assert {handle: reader.scored.get(handle, []) for handle in expected if handle % 2} == {
        handle: tokens for handle, tokens in expected.items() if handle % 2
    }
    assert set(reader.finishes) == set(expected)
