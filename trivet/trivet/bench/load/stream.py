"""From the bytes of an exchange to its figures: HTTP framing undone, server-sent events read for the few fields that count.

An event is stamped with the moment at which its last byte came. Nothing here runs while a server is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from trivet.bench.load.exchange import END, Exchange


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Event(msgspec.Struct, frozen=True):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was answered to its end; times in seconds. An event may hold more than one token."""

    ttft: float
    end_to_end: float
    gaps: tuple[float, ...]  # between events with text
    prompt_tokens: int | None  # as the server counts them; None where it doesn't say
    cached_tokens: int
    output_tokens: int
    counted: bool  # output tokens by the server; otherwise events were counted

    @property
    def tpot(self) -> float | None:
        return (self.end_to_end - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str


_decoder = msgspec.json.Decoder(Event)


def read(exchange: Exchange) -> Answer | Failure:
    """What an exchange was: answered, or refused, or broken off."""
    if exchange.fault:
        return Failure(exchange.fault)
    try:
        return _read(exchange)
    except (msgspec.DecodeError, ValueError) as error:
        return Failure(f"not to be read: {error}"[:300])


def _read(exchange: Exchange) -> Answer | Failure:
    lines = timed_lines(exchange.pieces)
    _, status = next(lines, (0.0, b""))
    if status.split(None, 2)[1:2] != [b"200"]:
        said = b" ".join(line for _, line in lines)
        return Failure(f"{status.decode(errors='replace') or 'no answer'}: {said.decode(errors='replace')[:300]}")
    stamps, usage, finished, ended = [], Usage(), False, exchange.began
    for when, line in lines:
        if not line.startswith(b"data:"):
            continue
        ended = when
        if line == END:
            finished = True
            break
        event = _decoder.decode(line[5:])
        if bytes(event.error) not in (b"", b"null"):
            return Failure(f"error event: {bytes(event.error).decode(errors='replace')[:300]}")
        usage = event.usage or usage
        choices = event.choices or ()
        finished = finished or any(choice.finish_reason for choice in choices)
        if any(_has_text(choice) for choice in choices):
            stamps.append(when)
    if not finished:
        return Failure("the stream broke off before its end")
    if not stamps:
        return Failure("no text in the stream")
    details = usage.prompt_tokens_details or CachedTokens()
    return Answer(
        ttft=stamps[0] - exchange.began,
        end_to_end=ended - exchange.began,
        gaps=tuple(after - before for before, after in pairwise(stamps)),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens or 0,
        output_tokens=usage.completion_tokens or len(stamps),
        counted=bool(usage.completion_tokens),
    )


def _has_text(choice: Choice) -> bool:
    return bool(choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content)))


def timed_lines(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The status line, then the body's lines, each with the moment at which it was whole."""
    head, left = b"", b""
    unframe: _Chunks | None = None
    in_body, when = False, 0.0
    for when, data in pieces:
        if not in_body:
            head += data
            top, found, data = head.partition(b"\r\n\r\n")
            if not found:
                continue
            in_body = True
            yield when, top.split(b"\r\n", 1)[0]
            unframe = _Chunks() if b"transfer-encoding: chunked" in top.lower() else None
        if unframe is not None:
            data = unframe.feed(data)
        *whole, left = (left + data).split(b"\n")
        for line in whole:
            yield when, line.rstrip(b"\r")
    if left:
        yield when, left


class _Chunks:
    """Undoes chunked transfer coding, wherever the pieces were cut."""

    def __init__(self) -> None:
        self._frame = b""  # an unfinished line of framing
        self._left = 0  # bytes of the chunk to come, and its line end
        self._is_over = False

    def feed(self, data: bytes) -> bytes:
        data, body = self._frame + data, []
        self._frame = b""
        while data and not self._is_over:
            if self._left:
                piece = data[: self._left]
                body.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                data = data[len(piece) :]
                continue
            size, found, rest = data.partition(b"\r\n")
            if not found:
                self._frame = data
                break
            length = int(size.split(b";", 1)[0], 16)
            self._is_over = length == 0
            self._left, data = length + 2, rest
        return b"".join(body)
