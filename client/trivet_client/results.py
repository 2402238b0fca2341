"""Whole answers, and how the events of a stream add up to one."""

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, field

from trivet_proto.errors import ErrorKind

from trivet_client.errors import ServerError
from trivet_client.events import Event, Finished, PromptLogprobs, ReasoningDelta, Started, TextDelta, TokenLogprob, ToolCallDelta, Usage
from trivet_client.messages import ToolCall


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `finish_reason`: stop, length, tool_calls or abort; ids and log probabilities where they were asked for."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a request, by index, and what they took in tokens."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    system_fingerprint: str = ""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Growing:
    """A choice whose end has not come."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    finished: Finished | None = None


class Collector:
    """Takes the events of one stream; `answer` is what they came to."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._growing: dict[int, _Growing] = {}
        self._prompt: list[TokenLogprob] = []
        self._usage = Usage()

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
            return
        if isinstance(event, PromptLogprobs):
            # More than one choice may report the prompt that they share.
            if event.first_position == len(self._prompt) + 1:
                self._prompt.extend(event.logprobs)
            return
        choice = self._growing.setdefault(event.index, _Growing())
        if isinstance(event, TextDelta):
            choice.texts.append(event.text)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            choice.reasoning.append(event.text)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
        elif isinstance(event, ToolCallDelta):
            call = choice.calls.setdefault(event.call_index, _Call())
            call.id = event.id or call.id
            call.name = event.name or call.name
            call.arguments.append(event.arguments)
        else:
            choice.finished = event
            self._usage = event.usage

    def answer(self) -> Answer:
        """Raises `ServerError` when the stream ended before a choice did."""
        choices = tuple(_choice_of(index, growing) for index, growing in sorted(self._growing.items()))
        if self._started is None or not choices:
            raise _cut_short()
        return Answer(
            request_id=self._started.request_id,
            model=self._started.model,
            choices=choices,
            usage=self._usage,
            prompt_logprobs=tuple(self._prompt),
            system_fingerprint=self._started.system_fingerprint,
        )


def collect(events: Iterable[Event]) -> Answer:
    """The answer that `events`, all of one stream, add up to. Raises `ServerError` when they end before a choice does."""
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.answer()


async def collect_async(events: AsyncIterable[Event]) -> Answer:
    """As `collect`, of an asynchronous stream."""
    collector = Collector()
    async for event in events:
        collector.add(event)
    return collector.answer()


def _choice_of(index: int, growing: _Growing) -> Choice:
    if growing.finished is None:
        raise _cut_short()
    return Choice(
        index=index,
        text="".join(growing.texts),
        finish_reason=growing.finished.finish_reason,
        stop_reason=growing.finished.stop_reason,
        token_ids=tuple(growing.token_ids),
        logprobs=tuple(growing.logprobs),
        reasoning="".join(growing.reasoning),
        tool_calls=tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(growing.calls.items())),
    )


def _cut_short() -> ServerError:
    return ServerError(ErrorKind.INTERNAL, "the server ended the stream before the answer was finished")
