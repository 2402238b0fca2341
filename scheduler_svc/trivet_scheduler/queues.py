"""Requests that do not run: in order of their turn, and those that cannot run yet.

Order is FCFS (by arrival) or by priority first; a preempted request comes back to the place that its arrival gives it. Blocked requests
(a sibling computes their prompt, or steps of their former life are still in flight) stand aside until `unblock`, so that a step never
looks at them. Ended requests leave the heap lazily.
"""

import heapq
from typing import Literal

from trivet_scheduler.request import Request

Policy = Literal["fcfs", "priority"]


class WaitingQueue:
    """Owns the order, not the requests."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[Request] = set()
        self._blocked: set[Request] = set()
        self._tokens: dict[Request, int] = {}  # of those who wait, as they came
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._blocked)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting or request in self._blocked

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens that still have to be computed before those who wait have their first token; an upper bound, prefix hits are not known."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        self._waiting.add(request)
        if request not in self._tokens:
            self._tokens[request] = request.num_tokens
            self._num_tokens += self._tokens[request]
        heapq.heappush(self._heap, (*self.rank(request), request))

    def block(self, request: Request) -> None:
        """Set it aside until `unblock`."""
        self._waiting.discard(request)
        self._blocked.add(request)

    def unblock(self, request: Request) -> None:
        if request in self._blocked:
            self._blocked.remove(request)
            self.push(request)

    def peek(self) -> Request | None:
        """Whose turn it is."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        self._waiting.discard(request)
        self._blocked.discard(request)
        self._num_tokens -= self._tokens.pop(request, 0)

    def rank(self, request: Request) -> tuple[int, int]:
        """Lower runs first. Arrival numbers are unique, so requests themselves are never compared."""
        return (request.spec.priority if self._policy == "priority" else 0), request.arrival
