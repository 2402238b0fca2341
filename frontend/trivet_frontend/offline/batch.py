"""Many prompts at once, each a request of its own, answered in the order in which they were given.

So many requests are under way as the engine takes; what it refuses for being full is asked again when one of ours has ended. An error
ends its own request alone. The counters are for whoever shows them; another thread may read them at any time.
"""

import asyncio
import os
from dataclasses import dataclass, replace

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.offline.outputs import CompletionOutput, RequestOutput
from trivet_frontend.offline.prompts import params_of, prompt_of, prompts_of
from trivet_frontend.offline.sampling_params import SamplingParams
from trivet_frontend.serving import CompletionInput, Generation, Inference, TokenLogprob


@dataclass(frozen=True, slots=True)
class _Question:
    request_id: str
    index: int
    prompt: object
    params: SamplingParams


class _Answer:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def output(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )


class Batch:
    """Prompts with their parameters; `run` answers them once."""

    def __init__(self, prompts: object, params: object = None) -> None:
        """One prompt or many, with parameters for all, or for each: whatever the caller wrote.

        Raises INVALID_ARGUMENT for what are none. What is no prompt among others ends its own request alone.
        """
        stem = os.urandom(6).hex()
        listed = prompts_of(prompts)
        pairs = zip(listed, params_of(params, len(listed)), strict=True)
        self._questions = [_Question(f"{stem}-{index}", index, prompt, each) for index, (prompt, each) in enumerate(pairs)]
        self._under_way = 0
        self._left = asyncio.Event()
        self.size = len(listed)
        self.finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    async def run(self, inference: Inference, *, at_once: int) -> list[RequestOutput]:
        """At most `at_once` requests are under way at one time."""
        outputs: list[RequestOutput | None] = [None] * self.size
        queue = iter(enumerate(self._questions))

        async def one_after_the_other() -> None:
            for index, question in queue:
                outputs[index] = output = await self._until_answered(inference, question)
                self.prompt_tokens += len(output.prompt_token_ids)
                self.finished += 1

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(min(at_once, self.size))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [output for output in outputs if output is not None]

    async def _until_answered(self, inference: Inference, question: _Question) -> RequestOutput:
        while True:
            self._under_way += 1
            try:
                output = await self._ask(inference, question)
            finally:
                self._under_way -= 1
                left, self._left = self._left, asyncio.Event()
                left.set()
            is_full = output.error is not None and output.error.kind is ErrorKind.OVERLOADED
            if not is_full or not self._under_way:
                return output
            await self._left.wait()

    async def _ask(self, inference: Inference, question: _Question) -> RequestOutput:
        text = question.prompt if isinstance(question.prompt, str) else None
        output = RequestOutput(request_id=question.request_id, prompt=text, prompt_token_ids=())
        try:
            prompt = prompt_of(question.prompt, question.index)
            generation = await inference.complete(
                CompletionInput(prompt=prompt), question.params.options(), model=None, request_id=question.request_id
            )
        except TrivetError as error:
            return replace(output, error=error)
        return await self._collect(generation, replace(output, prompt_token_ids=tuple(generation.prompt_of(0).token_ids)))

    async def _collect(self, generation: Generation, output: RequestOutput) -> RequestOutput:
        answers = [_Answer() for _ in range(generation.choice_count)]
        error: TrivetError | None = None
        prompt_logprobs: list[TokenLogprob | None] | None = None
        try:
            async for delta in generation.deltas():
                answer = answers[delta.index]
                answer.texts.append(delta.text)
                answer.token_ids += delta.token_ids
                self.output_tokens += len(delta.token_ids)
                if delta.logprobs is not None:
                    answer.logprobs = answer.logprobs if answer.logprobs is not None else []
                    answer.logprobs += delta.logprobs
                if delta.finish_reason is not None:
                    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
                prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
        except TrivetError as failure:
            error = failure
        finally:
            generation.close()
        return replace(
            output,
            outputs=tuple(answer.output(index) for index, answer in enumerate(answers)),
            cached_tokens=generation.usage.cached_tokens,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            error=error,
        )
