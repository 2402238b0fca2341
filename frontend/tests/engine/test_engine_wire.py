"""Session messages: what goes up holds the request, what comes down is read back whole."""

import asyncio
import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_frontend.engine import EngineRequest, FinishReason, SamplingParams, Submission, TokenDelta, TokenLogprobs, wire
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

VOCAB_SIZE = 2**31


def request_of(prompt_ids: list[int], *, n: int = 2, **sampling: object) -> Submission:
    request = EngineRequest(uid=b"u" * 16, prompt_ids=prompt_ids, sampling=SamplingParams(seed=7, max_tokens=5, **sampling), n=n)
    return Submission(request, fingerprint=b"", now=0.0, on_end=lambda submission: None)


def test_a_plain_request_sends_no_field_without_effect() -> None:
    [message] = wire.add_messages(request_of([1, 2, 3]), [10, 11], age_ms=4, timeout_ms=None)
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
    lists["processor_arguments"] = b'{"a":1}'
    [message] = wire.add_messages(request_of([1], **sampling, **lists), [1, 2], age_ms=0, timeout_ms=None)
    sent = message.add.sampling
    for name, value in sampling.items():
        assert getattr(sent, name) == value, name
    assert sent.HasField("logprobs")
    assert sent.extra == b'{"a":1}'
    assert unpack_i32(sent.logit_bias_ids).tolist() == [5, 6]
    assert unpack_f32(sent.logit_bias_values).tolist() == [-100.0, 1.5]
    assert unpack_i32(sent.bad_words_ids).tolist() == [1, 2, 3]
    assert unpack_i32(sent.bad_words_counts).tolist() == [2, 1]
    assert unpack_i32(sent.allowed_token_ids).tolist() == [8, 9]
    assert unpack_i32(sent.stop_token_ids).tolist() == [4]


def test_a_long_prompt_is_cut_into_numbered_parts_under_the_message_limit() -> None:
    prompt = list(range(2 * wire.PROMPT_IDS_PER_PART + 5))
    messages = wire.add_messages(request_of(prompt), [1, 2], age_ms=0, timeout_ms=None)
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
    assert [(handle, delta.token_ids, delta.finish_reason) for handle, delta in wire.deltas_of(outputs, vocab_size=VOCAB_SIZE)] == expected


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
    deltas = dict(wire.deltas_of(outputs, vocab_size=VOCAB_SIZE))
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
    [(handle, error)] = wire.errors_of(outputs).items()
    assert (handle, error.kind, error.param) == (3, ErrorKind.INVALID_ARGUMENT, "prompt")


def step(**changed: object) -> engine_pb2.StepOutputs:
    """A sound message of two rows with logprobs for the second, but for what is changed."""
    fields: dict[str, object] = {
        "handles": pack_u32([1, 2]),
        "token_counts": pack_i32([1, 2]),
        "token_ids": pack_i32([10, 20, 21]),
        "finish_reasons": pack_u8([0, 1]),
        "stop_token_ids": pack_i32([-1, 21]),
        "first_rows": pack_i32([1]),
        "cached_tokens": pack_i32([16]),
        "logprob_rows": pack_i32([1]),
        "logprobs": logprobs(),
    }
    return engine_pb2.StepOutputs(**(fields | changed))


def logprobs(**changed: bytes) -> types_pb2.Logprobs:
    fields = {
        "counts": pack_i32([1, 2]),
        "token_ids": pack_i32([20, 21, 5]),
        "values": pack_f32([-1, -2, -3]),
        "ranks": pack_i32([1, 2]),
    }
    return types_pb2.Logprobs(**(fields | changed))


def test_the_sound_step_is_read() -> None:
    assert [handle for handle, _ in wire.deltas_of(step(), vocab_size=100)] == [1, 2]


@pytest.mark.parametrize(
    "broken",
    [
        step(handles=b"abc"),
        step(handles=pack_u32([1, 2, 3])),
        step(handles=pack_u32([1, 1])),
        step(token_counts=pack_i32([1])),
        step(token_counts=pack_i32([2, 2])),
        step(token_counts=pack_i32([4, -1])),
        step(token_ids=b"\x00" * 5),
        step(token_ids=pack_i32([10, 20, 100])),
        step(token_ids=pack_i32([10, 20, -1])),
        step(finish_reasons=b""),
        step(finish_reasons=pack_u8([0, 99])),
        step(stop_token_ids=pack_i32([1])),
        step(first_rows=pack_i32([2])),
        step(first_rows=pack_i32([-1])),
        step(cached_tokens=b""),
        step(logprob_rows=pack_i32([2])),
        step(logprob_rows=pack_i32([0])),
        step(logprobs=types_pb2.Logprobs()),
        step(logprobs=logprobs(counts=pack_i32([3, 0]))),
        step(logprobs=logprobs(values=pack_f32([-1]))),
        step(logprobs=logprobs(ranks=pack_i32([1]))),
        step(prompt_logprobs=[engine_pb2.PromptLogprobs(handle=1, first_position=0, logprobs=logprobs())]),
        step(prompt_logprobs=[engine_pb2.PromptLogprobs(handle=1, first_position=at, logprobs=logprobs()) for at in (1, 4)]),
    ],
)
def test_a_message_that_contradicts_itself_is_refused_whole(broken: engine_pb2.StepOutputs) -> None:
    with pytest.raises(TrivetError) as caught:
        wire.deltas_of(broken, vocab_size=100)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


@given(
    data=st.binary(max_size=64),
    field=st.sampled_from(["handles", "token_counts", "token_ids", "finish_reasons", "first_rows", "logprob_rows"]),
)
def test_no_bytes_at_all_do_more_than_refuse(data: bytes, field: str) -> None:
    with contextlib.suppress(TrivetError):
        wire.deltas_of(step(**{field: data}), vocab_size=100)


@pytest.mark.parametrize("changed", [{"name": ""}, {"vocab_size": 0}, {"max_model_len": 0}, {"eos_token_ids": b"abc"}])
def test_a_card_that_describes_no_model_is_refused(changed: dict[str, object]) -> None:
    card = types_pb2.ModelCard(**({"name": "m", "vocab_size": 9, "max_model_len": 9} | changed))
    with pytest.raises(TrivetError):
        wire.model_of(card)


def test_a_request_that_others_began_says_what_each_child_has() -> None:
    submission = request_of([1, 2, 3], prompt_logprobs=0)
    first, second = submission.streams
    block = TokenLogprobs(token_ids=[[2]], values=[[-1.0]], ranks=[1])
    first.push(TokenDelta(cached_tokens=2, prompt_logprobs=block, prompt_position=1), now=0.0)
    second.push(TokenDelta(token_ids=[7, 8]), now=0.0)
    second.close()
    [message] = wire.add_messages(submission, [5, 6], age_ms=9, timeout_ms=100)
    states = message.add.resume
    assert [unpack_i32(state.output_token_ids).tolist() for state in states] == [[], [7, 8]]
    assert [state.done for state in states] == [False, True]
    # One of the two rows is missing, so they are asked for again.
    assert [state.prompt_logprobs_reported for state in states] == [False, True]
    assert [state.cached_tokens_reported for state in states] == [True, False]
    assert (message.add.age_ms, message.add.timeout_ms) == (9, 100)


def test_much_output_leaves_the_prompt_for_the_next_part() -> None:
    submission = request_of(list(range(5000)), n=2)
    for stream in submission.streams:
        stream.push(TokenDelta(token_ids=[1] * 130_000), now=0.0)
    messages = wire.add_messages(submission, [1, 2], age_ms=0, timeout_ms=None)
    assert all(message.ByteSize() <= MAX_STREAM_MESSAGE_BYTES for message in messages)
    assert sum(len(message.add.prompt_token_ids) for message in messages) == 20_000
    assert len(messages) == 2
    for stream in submission.streams:
        stream.push(TokenDelta(token_ids=[1] * 10_000), now=0.0)
    with pytest.raises(TrivetError, match="larger than a message"):
        wire.add_messages(submission, [1, 2], age_ms=0, timeout_ms=None)


def test_prompt_logprobs_that_come_again_are_dropped_and_a_gap_is_refused() -> None:
    [stream] = request_of([1, 2, 3, 4, 5], n=1).streams

    def chunk(first: int, *tokens: int) -> TokenDelta:
        block = TokenLogprobs([[token] for token in tokens], [[-1.0] for _ in tokens], [1 for _ in tokens])
        return TokenDelta(prompt_logprobs=block, prompt_position=first, cached_tokens=3)

    async def read() -> TokenDelta:
        return await stream.next()

    stream.push(chunk(1, 2, 3), now=0.0)
    stream.push(chunk(1, 2, 3, 4), now=0.0)
    delta = asyncio.run(read())
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs.token_ids == [[2], [3], [4]]
    with pytest.raises(ValueError, match="4 was next"):
        stream.push(chunk(5, 6), now=0.0)
