"""What a stream yields: one small frozen class for each kind of event, and how they are read off the wire."""

from collections.abc import Iterable
from dataclasses import dataclass

from trivet_proto.errors import TrivetError
from trivet_proto.packing import unpack_i32
from trivet_proto.v1 import inference_pb2

from trivet_client.errors import typed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its natural log probability, its rank among all (1: the likeliest), and its likeliest rivals.

    `token_bytes` is exact where `token` shows half a character as a replacement mark.
    """

    token: str
    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` of the prompt were read from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The request runs; always the first event."""

    request_id: str
    model: str
    prompt_tokens: int
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a piece of the prompt, from token `first_position` on (the first token has none)."""

    index: int
    first_position: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of choice `index`, never half a character; ids and log probabilities where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers, as `TextDelta`."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of tool call `call_index`: id and name once, `arguments` piece by piece."""

    index: int
    call_index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` is complete. `stop_reason` is the stop text or stop token's id that ended it, if one did; usage is of all choices."""

    index: int
    finish_reason: str
    stop_reason: str
    usage: Usage


Event = Started | PromptLogprobs | TextDelta | ReasoningDelta | ToolCallDelta | Finished


def event_of(wire: inference_pb2.GenerationEvent) -> Event | None:
    """None for a kind that a newer server may send. Raises the error that the event is."""
    kind = wire.WhichOneof("event")
    if kind == "text":
        return TextDelta(wire.index, wire.text.text, _ids(wire.text.token_ids), _logprobs(wire.text.logprobs))
    if kind == "finished":
        return Finished(wire.index, wire.finished.finish_reason, wire.finished.stop_reason, usage_of(wire.finished.usage))
    if kind == "started":
        started = wire.started
        return Started(started.request_id, started.model, started.prompt_tokens, started.system_fingerprint)
    if kind == "reasoning":
        return ReasoningDelta(wire.index, wire.reasoning.text, _ids(wire.reasoning.token_ids), _logprobs(wire.reasoning.logprobs))
    if kind == "tool_call":
        call = wire.tool_call
        return ToolCallDelta(wire.index, call.call_index, call.id, call.name, call.arguments)
    if kind == "prompt":
        return PromptLogprobs(wire.index, wire.prompt.first_position, _logprobs(wire.prompt.logprobs))
    if kind == "error":
        raise typed(TrivetError.from_proto(wire.error))
    return None


def usage_of(wire: inference_pb2.Usage) -> Usage:
    return Usage(wire.prompt_tokens, wire.completion_tokens, wire.cached_tokens, wire.reasoning_tokens)


def _ids(packed: bytes) -> tuple[int, ...]:
    return tuple(unpack_i32(packed, "token_ids").tolist()) if packed else ()


def _logprobs(rows: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(row.token, row.token_id, row.logprob, row.rank, row.token_bytes, _logprobs(row.top)) for row in rows)
