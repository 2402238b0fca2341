"""Events off the wire, and what they add up to; kinds that no model here gives included."""

import pytest
import trivet_client
from trivet_client import (
    Choice,
    ErrorKind,
    Finished,
    NotServedError,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TrivetError,
    Usage,
    collect,
)
from trivet_client.events import event_of
from trivet_proto.packing import pack_i32
from trivet_proto.v1 import inference_pb2

STARTED = Started("id", "model", 3, "print")
USAGE = Usage(3, 5, 1, 2)


def finished(index: int = 0, reason: str = "stop") -> Finished:
    return Finished(index, reason, "", USAGE)


def wire(**event: object) -> inference_pb2.GenerationEvent:
    return inference_pb2.GenerationEvent(index=1, **event)


def test_every_kind_of_event_has_its_class() -> None:
    row = inference_pb2.TokenLogprob(token="a", token_id=5, logprob=-0.5, rank=1, token_bytes=b"a", top=[{"token": "b", "token_id": 6}])
    read = TokenLogprob("a", 5, -0.5, 1, b"a", (TokenLogprob("b", 6, 0.0, 0, b""),))
    delta = inference_pb2.TextDelta(text="a", token_ids=pack_i32([5]), logprobs=[row])
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=1, reasoning_tokens=2)
    call = inference_pb2.ToolCallDelta(call_index=2, id="x", name="f", arguments="{")
    for sent, event in (
        ({"started": {"request_id": "id", "model": "model", "prompt_tokens": 3, "system_fingerprint": "print"}}, STARTED),
        ({"text": delta}, TextDelta(1, "a", (5,), (read,))),
        ({"reasoning": delta}, ReasoningDelta(1, "a", (5,), (read,))),
        ({"tool_call": call}, ToolCallDelta(1, 2, "x", "f", "{")),
        ({"finished": {"finish_reason": "stop", "stop_reason": "END", "usage": usage}}, Finished(1, "stop", "END", USAGE)),
        ({"prompt": {"logprobs": [row], "first_position": 1}}, PromptLogprobs(1, 1, (read,))),
    ):
        assert event_of(wire(**sent)) == event
    known = {field.name for field in inference_pb2.GenerationEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert known == {"started", "text", "reasoning", "tool_call", "finished", "prompt", "error"}, "a new kind needs a class"


def test_a_kind_of_a_newer_server_is_passed_over() -> None:
    assert event_of(inference_pb2.GenerationEvent(index=1)) is None


def test_an_error_event_is_raised_as_its_class() -> None:
    error = TrivetError(ErrorKind.UNIMPLEMENTED, "not here", param="tools")
    with pytest.raises(NotServedError, match="not here") as caught:
        event_of(wire(error=error.to_proto()))
    assert caught.value.param == "tools"


def test_pieces_of_tool_calls_and_reasoning_add_up() -> None:
    answer = collect(
        [
            STARTED,
            ReasoningDelta(0, "Let me ", (1,)),
            ReasoningDelta(0, "see.", (2,)),
            TextDelta(0, "I look.", (3,)),
            ToolCallDelta(0, 1, "b", "second", ""),
            ToolCallDelta(0, 0, "a", "first", '{"x"'),
            ToolCallDelta(0, 0, "", "", ":1}"),
            finished(reason="tool_calls"),
        ]
    )
    calls = (ToolCall("a", "first", '{"x":1}'), ToolCall("b", "second", ""))
    assert answer.choices == (Choice(0, "I look.", "tool_calls", "", (1, 2, 3), (), "Let me see.", calls),)
    assert answer.usage == USAGE
    assert answer.system_fingerprint == "print"


def test_choices_may_finish_in_any_order_and_without_text() -> None:
    answer = collect([STARTED, TextDelta(1, "b"), finished(1), finished(0, "abort")])
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [(0, "", "abort"), (1, "b", "stop")]
    assert answer.text == ""


def test_the_prompt_is_reported_once_though_every_choice_tells_it() -> None:
    rows = tuple(TokenLogprob(str(number), number, -1.0, 1, b"") for number in range(4))
    pieces = [PromptLogprobs(index, first, rows[first - 1 : first + 1]) for index in (0, 1) for first in (1, 3)]
    assert collect([STARTED, *pieces, finished(0), finished(1)]).prompt_logprobs == rows


def test_what_is_public_is_named_once_and_there() -> None:
    names = trivet_client.__all__
    assert sorted(names, key=str.lower) == sorted(set(names), key=str.lower)
    assert all(hasattr(trivet_client, name) for name in names)
