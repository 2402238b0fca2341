"""A request under way: its choices' deltas as one stream, its usage, and its end.

Whoever starts a generation reads it to its end or closes it; either way every choice has then ended at the engine and is counted once. A
generation knows neither HTTP nor gRPC and renders no text of its own.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine import AbortReason, FinishReason, TokenLogprobs
from trivet_frontend.serving.choice import Choice
from trivet_frontend.serving.metrics import FrontendMetrics
from trivet_frontend.serving.outcome import ChoiceDelta, PreparedPrompt, TokenLogprob, Usage
from trivet_frontend.serving.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWishes:
    """What a caller wants to see of the prompt itself."""

    echo: bool = False
    # Top-n per prompt token in an echo, and in the report of its own.
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(slots=True)
class PromptState:
    """One prompt, and the logprobs of it that its first choice brings for all of its choices."""

    prompt: PreparedPrompt
    choices: list[Choice]
    known: asyncio.Event = field(default_factory=asyncio.Event)


class Generation:
    """All choices of one request, numbered prompt-major."""

    def __init__(
        self,
        *,
        request_id: str,
        model: ServedModel,
        model_name: str,
        prompts: Sequence[PromptState],
        choices_per_prompt: int,
        wishes: PromptWishes,
        clock: Clock,
        arrived: float,
        metrics: FrontendMetrics,
        on_end: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        # An id of our own: the caller's request id may come twice.
        self.answer_id = uuid.uuid4().hex
        self.model = model
        self.model_name = model_name
        self.created = int(clock.wall())
        self.choice_count = len(prompts) * choices_per_prompt
        self._prompts = prompts
        self._per_prompt = choices_per_prompt
        self._wishes = wishes
        self._describe_logprobs = model.language.describe_logprobs
        self._clock = clock
        self.arrived = arrived
        self._metrics = metrics
        self._on_end = on_end
        self._outcome: str | None = None
        self._closed = False
        metrics.requests_in_flight.inc()

    def prompt_of(self, choice_index: int) -> PreparedPrompt:
        return self._prompts[choice_index // self._per_prompt].prompt

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=sum(len(state.prompt.token_ids) for state in self._prompts),
            completion_tokens=sum(choice.completion_tokens for state in self._prompts for choice in state.choices),
            cached_tokens=sum(state.choices[0].cached_tokens for state in self._prompts if state.choices),
        )

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Every delta of every choice; ends when all have ended, raises the first error. Closes the generation at its end."""
        try:
            choices = [(state, choice) for state in self._prompts for choice in state.choices]
            if not choices:
                for index in range(self.choice_count):
                    yield self._echo_alone(index)
            elif len(choices) == 1:
                async with contextlib.aclosing(self._deltas_of(*choices[0])) as deltas:
                    async for delta in deltas:
                        yield delta
            else:
                async with contextlib.aclosing(self._merged(choices)) as deltas:
                    async for delta in deltas:
                        yield delta
            self._outcome = FinishReason.LENGTH.value
        except Exception as error:
            cancelled = isinstance(error, TrivetError) and error.kind is ErrorKind.CANCELLED
            self._outcome = (FinishReason.ABORT if cancelled else FinishReason.ERROR).value
            raise
        finally:
            self.close()

    def close(self) -> None:
        """End what still runs and count how it ended. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # Without an outcome the reader has gone.
        outcome = self._outcome or FinishReason.ABORT.value
        reason = AbortReason.SIBLING_FAILED if outcome == FinishReason.ERROR.value else AbortReason.CLIENT_GONE
        finishes: list[str] = []
        for state in self._prompts:
            for choice in state.choices:
                if choice.finish_reason is None:
                    choice.abort(reason)
                finishes.append(choice.finish_reason or outcome)
                if choice.completion_tokens:
                    self._metrics.request_generation_tokens.observe(choice.completion_tokens)
        for finish in finishes or [outcome] * self.choice_count:
            self._metrics.finished[finish].inc()
        if self._outcome == FinishReason.LENGTH.value:
            self._metrics.end_to_end.observe(self._clock.monotonic() - self.arrived)
        self._metrics.requests_in_flight.dec()
        self._on_end()

    async def _deltas_of(self, state: PromptState, choice: Choice) -> AsyncGenerator[ChoiceDelta, None]:
        previous: float | None = None
        received = counted = 0
        shown = False
        while choice.finish_reason is None:
            delta = await choice.next()
            if choice.received_tokens > received:
                received = choice.received_tokens
                now = self._clock.monotonic()
                if previous is None:
                    self._note_first_token(state, choice, now)
                else:
                    self._metrics.inter_token_latency.observe(now - previous)
                previous = now
            elif delta.finish_reason is None:
                continue  # a piece of the prompt's logprobs, ahead of the first token
            self._metrics.generation_tokens.inc(delta.completion_tokens - counted)
            counted = delta.completion_tokens
            if choice is state.choices[0]:
                state.known.set()  # the prompt's logprobs come before the first token
            if not shown:
                if self._wishes_logprobs:
                    await state.known.wait()
                self._add_prompt(delta, state)
                shown = True
            yield delta

    def _note_first_token(self, state: PromptState, choice: Choice, now: float) -> None:
        self._metrics.time_to_first_token.observe(now - self.arrived)
        if choice is state.choices[0]:
            self._metrics.prompt_tokens.inc(len(state.prompt.token_ids))
            self._metrics.request_prompt_tokens.observe(len(state.prompt.token_ids))

    @property
    def _wishes_logprobs(self) -> bool:
        return self._wishes.echo_logprobs is not None or self._wishes.prompt_logprobs is not None

    def _add_prompt(self, delta: ChoiceDelta, state: PromptState) -> None:
        """Put the echo and the prompt's logprobs before a choice's first delta."""
        wishes = self._wishes
        rows = state.choices[0].prompt_logprobs or TokenLogprobs()
        if wishes.prompt_logprobs is not None:
            delta.prompt_logprobs = [None, *self._describe_logprobs(rows, wishes.prompt_logprobs)]
        if not wishes.echo:
            return
        delta.text = state.prompt.text + delta.text
        if wishes.echo_logprobs is not None:
            first = self._describe_logprobs(TokenLogprobs(token_ids=[[state.prompt.token_ids[0]]], values=[[0.0]], ranks=[1]), 0)[0]
            # The first prompt token has no probability: nothing comes before it.
            unknown = TokenLogprob(first.token, first.token_id, None, None, first.token_bytes)
            delta.logprobs = [unknown, *self._describe_logprobs(rows, wishes.echo_logprobs), *(delta.logprobs or [])]

    def _echo_alone(self, index: int) -> ChoiceDelta:
        prompt = self.prompt_of(index)
        text = prompt.text if self._wishes.echo else ""
        return ChoiceDelta(index=index, text=text, finish_reason=FinishReason.LENGTH.value)

    async def _merged(self, choices: Sequence[tuple[PromptState, Choice]]) -> AsyncGenerator[ChoiceDelta, None]:
        # One place per choice: a reader that is slow makes deltas merge in the engine's streams, not pile up here.
        ready: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(choices))

        async def pump(state: PromptState, choice: Choice) -> None:
            try:
                async for delta in self._deltas_of(state, choice):
                    await ready.put(delta)
            except Exception as error:
                await ready.put(error)  # the reader raises it
            else:
                await ready.put(None)

        tasks = [asyncio.create_task(pump(state, choice)) for state, choice in choices]
        try:
            running = len(tasks)
            while running:
                item = await ready.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
