"""The one road: a conversation or prompts in, a running generation out. HTTP and gRPC are skins over this.

`Inference` owns what is served (the model with its names and language) and the door (draining, how many may be inside). Order of a
request's checks: may anyone enter, is the model known, are the wishes possible, then the costly part (render, tokenize), do the lengths
fit, and only then the engine.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.chat import normalised_messages
from trivet_frontend.engine import EngineClient, EngineRequest, SamplingParams
from trivet_frontend.serving.choice import Choice
from trivet_frontend.serving.generation import Generation, PromptState, PromptWishes
from trivet_frontend.serving.language import Language
from trivet_frontend.serving.metrics import FrontendMetrics
from trivet_frontend.serving.open_streams import OpenStreams
from trivet_frontend.serving.options import ChatInput, CompletionInput, GenerationOptions
from trivet_frontend.serving.outcome import PreparedPrompt
from trivet_frontend.serving.prompts import normalised_prompts
from trivet_frontend.serving.sampling import check_options, check_text, check_token_ids, refuse, resolve_sampling
from trivet_frontend.serving.served_model import ServedModel
from trivet_frontend.serving.tools import check_tools

MAX_CHOICES = 1024
MAX_DETOKENIZED = 1_000_000
RETRY_AFTER_MS = 1000


class Entry:
    """A request inside the door; whoever has it leaves once, whatever happens."""

    def __init__(self, leave: Callable[[], None], *, model: ServedModel, model_name: str, arrived: float, timeout_s: float | None) -> None:
        self.model = model
        self.model_name = model_name
        self.arrived = arrived
        self.timeout_s = timeout_s
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        """Go out; a second call does nothing."""
        if self._leave is not None:
            self._leave()
            self._leave = None


class Inference:
    """What both public APIs call."""

    def __init__(self, engine: EngineClient, *, clock: Clock, max_requests: int, request_timeout: float = 0.0) -> None:
        """`request_timeout`: seconds that any request may take; 0: as long as its caller waits."""
        self._engine = engine
        self._clock = clock
        self.max_requests = max_requests
        self._request_timeout = request_timeout
        self._inside = 0
        self._served: tuple[ServedModel, FrontendMetrics] | None = None
        self._emptied = asyncio.Event()
        self.draining = False
        self.streams = OpenStreams()

    # ---- what is served ----

    def serve(self, model: ServedModel, metrics: FrontendMetrics) -> None:
        """Open the door for `model`."""
        self._served = (model, metrics)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self._served is not None and not self.draining and self._engine.ready

    @property
    def requests_inside(self) -> int:
        return self._inside

    def progress(self) -> tuple[bool, float | None]:
        """Whether requests are inside, and for how many seconds the one that waits longest has seen no sign of work being done."""
        _, age = self._engine.progress()
        return self._inside > 0, age

    def model(self, name: str | None) -> ServedModel:
        """The model called `name`, or the only one when none is named; raises MODEL_NOT_FOUND or UNAVAILABLE."""
        if self._served is None:
            raise TrivetError(ErrorKind.UNAVAILABLE, "the model is still loading", retryable=True, retry_after_ms=RETRY_AFTER_MS)
        model, _ = self._served
        if name and name not in model.names:
            raise TrivetError(
                ErrorKind.MODEL_NOT_FOUND, f"there is no model {name[:128]!r}; served here: {', '.join(model.names)}", param="model"
            )
        return model

    async def until_empty(self) -> None:
        """Return when no request is inside."""
        while self._inside:
            self._emptied.clear()
            await self._emptied.wait()

    # ---- generation ----

    async def chat(self, chat: ChatInput, options: GenerationOptions, *, model: str | None, request_id: str) -> Generation:
        """Answer a conversation. Who gets the generation must close it."""
        async with self._entry(model, options) as entry:
            if chat.messages == []:
                raise refuse("messages", "must not be empty")
            tools = check_tools(chat.tools, chat.tool_choice)
            token_ids = await entry.model.language.encode_chat(replace(chat, tools=tools))
            echoed = normalised_messages(chat.messages[-1:])[0]["content"] if chat.echo and chat.continue_final_message else ""
            wishes = PromptWishes(echo=bool(echoed), prompt_logprobs=options.prompt_logprobs)
            return await self._start(entry, [PreparedPrompt(token_ids, echoed)], options, wishes, request_id)

    async def complete(self, completion: CompletionInput, options: GenerationOptions, *, model: str | None, request_id: str) -> Generation:
        """Continue one or several prompts. Who gets the generation must close it."""
        async with self._entry(model, options) as entry:
            language = entry.model.language
            given = normalised_prompts(completion.prompt, vocab_size=entry.model.description.vocab_size)
            max_model_len = entry.model.description.max_model_len
            for one in given:
                if isinstance(one, str):
                    check_text(one, param="prompt", max_model_len=max_model_len)
            prompts = await asyncio.gather(*(self._prepare(language, one, completion, index) for index, one in enumerate(given)))
            wishes = PromptWishes(
                echo=completion.echo,
                echo_logprobs=options.logprobs if completion.echo else None,
                prompt_logprobs=options.prompt_logprobs,
            )
            return await self._start(entry, prompts, options, wishes, request_id)

    # ---- tokens ----

    async def tokenize(self, text: str, *, add_special_tokens: bool, model: str | None) -> list[int]:
        return await self.model(model).language.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, chat: ChatInput, *, model: str | None) -> list[int]:
        tools = check_tools(chat.tools, None)
        return await self.model(model).language.encode_chat(replace(chat, tools=tools))

    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool, model: str | None) -> str:
        served = self.model(model)
        check_token_ids("tokens", token_ids, vocab_size=served.description.vocab_size, most=MAX_DETOKENIZED)
        return served.language.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # ---- the way in ----

    async def _prepare(self, language: Language, entry: str | list[int], completion: CompletionInput, index: int) -> PreparedPrompt:
        if isinstance(entry, str):
            token_ids = await language.encode(entry, add_special_tokens=completion.add_special_tokens)
            if not token_ids:
                raise refuse("prompt", f"has no tokens at index {index}")
            return PreparedPrompt(token_ids, entry if completion.echo else "")
        return PreparedPrompt(entry, language.decode(entry, skip_special_tokens=False) if completion.echo else "")

    @contextlib.asynccontextmanager
    async def _entry(self, model_name: str | None, options: GenerationOptions) -> AsyncIterator[Entry]:
        """Let a request in; it leaves with its generation, or at once when none came of it."""
        entry = self._enter(model_name, options)
        try:
            async with asyncio.timeout(entry.timeout_s):
                yield entry
        except TimeoutError:
            entry.leave()
            raise TrivetError(ErrorKind.DEADLINE_EXCEEDED, "the request's time ran out before it was begun") from None
        except BaseException:
            entry.leave()
            raise

    def _enter(self, model_name: str | None, options: GenerationOptions) -> Entry:
        if self.draining:
            raise TrivetError(ErrorKind.UNAVAILABLE, "this server is leaving; try again elsewhere", retryable=True)
        arrived = self._clock.monotonic()
        model = self.model(model_name)
        model.check_serves("generate")
        check_options(options, vocab_size=model.description.vocab_size, max_logprobs=model.description.max_logprobs)
        if not self._engine.ready:
            raise TrivetError(ErrorKind.UNAVAILABLE, "no worker is ready to serve the model", retryable=True, retry_after_ms=RETRY_AFTER_MS)
        if self._inside >= self.max_requests:
            raise TrivetError(
                ErrorKind.OVERLOADED,
                f"{self._inside} requests are being served here, which is the limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._inside += 1
        limits = [limit for limit in (options.timeout_s, self._request_timeout or None) if limit is not None]
        return Entry(
            self._leave,
            model=model,
            model_name=model_name or model.names[0],
            arrived=arrived,
            timeout_s=min(limits, default=None),
        )

    async def _start(
        self, entry: Entry, prompts: Sequence[PreparedPrompt], options: GenerationOptions, wishes: PromptWishes, request_id: str
    ) -> Generation:
        model, n = entry.model, options.n or 1
        if n * len(prompts) > MAX_CHOICES:
            raise refuse("n", f"times the number of prompts must be at most {MAX_CHOICES}, not {n * len(prompts)}")
        bad_words = await model.language.bad_words(options.bad_words) if options.bad_words else ()
        samplings = [
            resolve_sampling(
                options,
                defaults=model.defaults,
                prompt_tokens=len(prompt.token_ids),
                max_model_len=model.description.max_model_len,
                vocab_size=model.description.vocab_size,
                bad_words=bad_words,
                prompt_logprobs=_most(wishes.echo_logprobs, wishes.prompt_logprobs),
            )
            for prompt in prompts
        ]
        states = [PromptState(prompt, []) for prompt in prompts]
        assert self._served is not None
        generation = Generation(
            request_id=request_id,
            model=model,
            model_name=entry.model_name,
            prompts=states,
            choices_per_prompt=n,
            wishes=wishes,
            clock=self._clock,
            arrived=entry.arrived,
            metrics=self._served[1],
            on_end=entry.leave,
        )
        # An echo alone needs no engine: nothing is computed for it.
        if options.max_tokens != 0 or samplings[0].prompt_logprobs is not None:
            try:
                self._submit(generation, states, samplings, options, timeout_s=entry.timeout_s)
            except TrivetError:
                generation.close()
                raise
        return generation

    def _submit(
        self,
        generation: Generation,
        states: Sequence[PromptState],
        samplings: Sequence[SamplingParams],
        options: GenerationOptions,
        *,
        timeout_s: float | None,
    ) -> None:
        model, n = generation.model, options.n or 1
        age_ms = int(1000 * (self._clock.monotonic() - generation.arrived))
        user_stop_ids = frozenset(options.stop_token_ids)
        for number, (state, sampling) in enumerate(zip(states, samplings, strict=True)):
            request = EngineRequest(
                uid=os.urandom(16),
                prompt_ids=state.prompt.token_ids,
                sampling=sampling,
                n=n,
                priority=options.priority or 0,
                cache_salt=options.cache_salt or "",
                timeout_ms=None if timeout_s is None else max(1, int(1000 * timeout_s) - age_ms),
                age_ms=age_ms,
                request_id=generation.request_id,
            )
            submission = self._engine.submit(request, model=model.description)
            for stream in submission.streams:
                state.choices.append(
                    Choice(
                        index=number * n + stream.index,
                        submission=submission,
                        stream=stream,
                        text=model.language.output_text(state.prompt.token_ids, options),
                        logprobs=options.logprobs,
                        describe_logprobs=model.language.describe_logprobs,
                        user_stop_ids=user_stop_ids,
                    )
                )

    def _leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._emptied.set()


def _most(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
