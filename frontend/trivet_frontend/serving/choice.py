"""One choice on its way out: the engine's deltas in, text deltas out.

It owns the choice's stream, its incremental text, and the logprob rows of tokens whose text is still held back. Text, ids and logprobs
leave together.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from trivet_frontend.engine import AbortReason, FinishReason, Submission, TokenLogprobs, TokenStream
from trivet_frontend.serving.outcome import ChoiceDelta, TokenLogprob
from trivet_frontend.text import Release


class OutputText(Protocol):
    """The text of one choice as its tokens come."""

    def push(self, token_ids: Sequence[int], *, finished: bool, stop_token: bool) -> Release: ...


DescribeLogprobs = Callable[[TokenLogprobs, int], list[TokenLogprob]]


class Choice:
    """One choice of a request."""

    def __init__(
        self,
        *,
        index: int,
        submission: Submission,
        stream: TokenStream,
        text: OutputText,
        logprobs: int | None,
        describe_logprobs: DescribeLogprobs,
        user_stop_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.cached_tokens = 0
        # What the engine sent, and what of it has left with its text.
        self.received_tokens = 0
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.prompt_logprobs: TokenLogprobs | None = None
        self._submission = submission
        self._stream = stream
        self._text = text
        self._logprobs = logprobs
        self._describe_logprobs = describe_logprobs
        self._user_stop_ids = user_stop_ids
        self._held_ids: list[int] = []
        self._held_rows = TokenLogprobs()

    async def next(self) -> ChoiceDelta:
        """What the engine's next delta lets out, which may be nothing but a count; raises the error that ended the choice."""
        delta = await self._stream.next()
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = delta.prompt_logprobs
            else:
                self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.received_tokens += len(delta.token_ids)
        finished = delta.finish_reason is not None
        release = self._text.push(delta.token_ids, finished=finished, stop_token=delta.stop_token_id is not None)
        self._held_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._held_rows.extend(delta.logprobs)
        out = ChoiceDelta(index=self.index, text=release.text, token_ids=self._held_ids[: release.tokens])
        del self._held_ids[: release.tokens]
        if self._logprobs is not None:
            out.logprobs = self._describe_logprobs(_cut(self._held_rows, release.tokens), self._logprobs)
        self.completion_tokens += release.tokens
        out.completion_tokens = self.completion_tokens
        if release.stop is not None:
            # The text above is the truth from here on; what the engine still computes is overrun.
            self._submission.stop(self._stream, self.completion_tokens)
            out.finish_reason, out.stop_reason = FinishReason.STOP.value, release.stop
        elif delta.finish_reason is not None:
            out.finish_reason = delta.finish_reason.value
            if delta.stop_token_id in self._user_stop_ids:
                out.stop_reason = delta.stop_token_id
        self.finish_reason = out.finish_reason
        return out

    def abort(self, reason: AbortReason) -> None:
        """Give the choice up; nothing happens if it has ended."""
        self._submission.abort_streams((self._stream,), reason)


def _cut(rows: TokenLogprobs, count: int) -> TokenLogprobs:
    """Take the first `count` rows out of `rows`."""
    taken = TokenLogprobs(token_ids=rows.token_ids[:count], values=rows.values[:count], ranks=rows.ranks[:count])
    del rows.token_ids[:count], rows.values[:count], rows.ranks[:count]
    return taken
