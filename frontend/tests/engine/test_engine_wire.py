"""Session messages: what goes up holds the request, what comes down is read back whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_frontend.engine import EngineRequest, FinishReason, SamplingParams, TokenDelta, wire
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2


def request_of(prompt_ids: list[int], **sampling: object) -> EngineRequest:
    return EngineRequest(uid=b"u" * 16, prompt_ids=prompt_ids, sampling=SamplingParams(seed=7, max_tokens=5, **sampling), n=2)


def test_a_plain_request_sends_no_field_without_effect() -> None:
    [message] = wire.add_messages(request_of([1, 2, 3]), [10, 11], age_ms=4)
    add = message.add
    assert unpack_u32(add.handles).tolist() == [10, 11]
    assert unpack_i32(add.prompt_token_ids).tolist() == [1, 2, 3]
    assert (add.seed, add.age_ms, add.sampling.max_tokens) == (7, 4, 5)
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"):
        assert not add.sampling.HasField(name)
    assert not add.HasField("part")


def test_every_sampling_field_arrives() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 9,
        "min_p": 0.25,
        "min_tokens": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logprobs": 0,
        "prompt_logprobs": 2,
        "ignore_eos": True,
    }
    lists = {"logit_bias": ((5, -100.0), (6, 1.5)), "bad_words": ((1, 2), (3,)), "allowed_token_ids": (8, 9), "stop_token_ids": (4,)}
    [message] = wire.add_messages(request_of([1], **sampling, **lists), [1, 2], age_ms=0)
    sent = message.add.sampling
    for name, value in sampling.items():
        assert getattr(sent, name) == value, name
    assert sent.HasField("logprobs")
    assert unpack_i32(sent.logit_bias_ids).tolist() == [5, 6]
    assert unpack_f32(sent.logit_bias_values).tolist() == [-100.0, 1.5]
    assert unpack_i32(sent.bad_words_ids).tolist() == [1, 2, 3]
    assert unpack_i32(sent.bad_words_counts).tolist() == [2, 1]
    assert unpack_i32(sent.allowed_token_ids).tolist() == [8, 9]
    assert unpack_i32(sent.stop_token_ids).tolist() == [4]


def test_a_long_prompt_is_cut_into_numbered_parts_under_the_message_limit() -> None:
    prompt = list(range(2 * wire.PROMPT_IDS_PER_PART + 5))
    messages = wire.add_messages(request_of(prompt), [1, 2], age_ms=0)
    assert [(message.add.part.index, message.add.part.count) for message in messages] == [(0, 3), (1, 3), (2, 3)]
    assert all(message.ByteSize() < MAX_STREAM_MESSAGE_BYTES for message in messages)
    joined = np.concatenate([unpack_i32(message.add.prompt_token_ids) for message in messages])
    assert joined.tolist() == prompt


@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.sampled_from([0, 1, 2, 3])), max_size=6))
def test_rows_of_a_step_are_read_back_by_handle(rows: list[tuple[list[int], int]]) -> None:
    outputs = engine_pb2.StepOutputs(
        handles=pack_u32([100 + row for row in range(len(rows))]),
        token_counts=pack_i32([len(tokens) for tokens, _ in rows]),
        token_ids=pack_i32([token for tokens, _ in rows for token in tokens]),
        finish_reasons=pack_u8([finish for _, finish in rows]),
    )
    names = {0: None, 1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.ABORT}
    expected = [(100 + row, tokens, names[finish]) for row, (tokens, finish) in enumerate(rows)]
    assert [(handle, delta.token_ids, delta.finish_reason) for handle, delta in wire.deltas_of(outputs)] == expected


def test_logprobs_go_to_the_rows_that_have_them() -> None:
    outputs = engine_pb2.StepOutputs(
        handles=pack_u32([1, 2, 3]),
        token_counts=pack_i32([1, 2, 1]),
        token_ids=pack_i32([10, 20, 21, 30]),
        finish_reasons=pack_u8([0, 0, 1]),
        stop_token_ids=pack_i32([-1, -1, 30]),
        first_rows=pack_i32([2]),
        cached_tokens=pack_i32([16]),
        logprob_rows=pack_i32([1, 2]),
        logprobs=types_pb2.Logprobs(
            counts=pack_i32([2, 2, 1]),
            token_ids=pack_i32([20, 5, 21, 6, 30]),
            values=pack_f32([-1, -2, -3, -4, -5]),
            ranks=pack_i32([2, 1, 3]),
        ),
        prompt_logprobs=[
            engine_pb2.PromptLogprobs(
                handle=9,
                first_position=1,
                logprobs=types_pb2.Logprobs(counts=pack_i32([1]), token_ids=pack_i32([7]), values=pack_f32([-1]), ranks=pack_i32([1])),
            )
        ],
    )
    deltas = dict(wire.deltas_of(outputs))
    assert deltas[1].logprobs is None
    assert deltas[2].logprobs is not None
    assert deltas[2].logprobs.token_ids == [[20, 5], [21, 6]]
    assert deltas[2].logprobs.ranks == [2, 1]
    assert deltas[3].logprobs is not None
    assert deltas[3].logprobs.values == [[-5.0]]
    assert (deltas[3].stop_token_id, deltas[3].cached_tokens) == (30, 16)
    assert deltas[2].stop_token_id is None
    # A chunk of a prompt that is still being computed has no row of its own.
    assert deltas[9].prompt_logprobs is not None
    assert deltas[9].token_ids == []


@given(cuts=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_merged_deltas_hold_the_tokens_in_order(cuts: list[int]) -> None:
    total, merged = 0, TokenDelta()
    for index, count in enumerate(cuts):
        last = index == len(cuts) - 1
        merged.merge(TokenDelta(token_ids=list(range(total, total + count)), finish_reason=FinishReason.LENGTH if last else None))
        total += count
    assert merged.token_ids == list(range(total))
    assert merged.finish_reason is FinishReason.LENGTH


def test_a_row_error_keeps_kind_and_param() -> None:
    refused = TrivetError(ErrorKind.INVALID_ARGUMENT, "too long", param="prompt")
    outputs = engine_pb2.StepOutputs(errors=[engine_pb2.RowError(handle=3, error=refused.to_proto())])
    [(handle, error)] = wire.errors_of(outputs)
    assert (handle, error.kind, error.param) == (3, ErrorKind.INVALID_ARGUMENT, "prompt")


def test_arrays_of_broken_length_are_refused() -> None:
    with pytest.raises(TrivetError, match="multiple of 4"):
        wire.deltas_of(engine_pb2.StepOutputs(handles=b"abc"))
