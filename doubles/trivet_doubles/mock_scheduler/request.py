"""One child of a request at the mock scheduler: how far it is, and what it has new for its frontend.

Its tokens come from the token law; nothing is scheduled and no cache is kept. What the contract promises of ends and limits holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import TrivetError
from trivet_proto.v1 import types_pb2

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
ERROR, ABORT = types_pb2.FINISH_REASON_ERROR, types_pb2.FINISH_REASON_ABORT


@dataclass(slots=True, eq=False)
class MockRequest:
    """Owned by its session. `limit` is in tokens, the prompt included; `ready_at` is when its modelled prefill is over."""

    handle: int
    uid: bytes
    prompt: NDArray[np.int32]
    sampling: types_pb2.SamplingParams
    stop_ids: frozenset[int]
    limit: int
    tokens: Iterator[int]
    cached_tokens: int
    ready_at: float
    queued_at: float
    num_output: int = 0
    finish: int = 0
    stop_token: int = -1
    error: TrivetError | None = None
    reports_start: bool = True  # cached tokens and timing are still to be said
    reports_prompt: bool = False  # prompt logprobs are still to be said
    fresh: list[int] = field(default_factory=list)  # since the last output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output

    def advance(self, most: int) -> None:
        """Up to so many tokens more, as far as limits and stop tokens allow."""
        for _ in range(most):
            if self.finish:
                return
            if self.num_tokens >= self.limit:
                self.finish = LENGTH
                return
            token = next(self.tokens)
            self.num_output += 1
            self.fresh.append(token)
            if token in self.stop_ids and self.num_output > self.sampling.min_tokens:
                self.finish, self.stop_token = STOP, token
            elif self.num_tokens >= self.limit:
                self.finish = LENGTH

    def fail(self, error: TrivetError) -> None:
        self.finish, self.error = ERROR, error
