"""Every request that is alive: where it stands, how it leaves, and what is new for whoever asked.

A request waits, in the queue, or runs, on one replica. The book moves it between the two and is its one way out, so that each request
ends exactly once. What changes is left in `take_deltas`. The book decides nothing: who runs is the business of the rooms around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trivet_chassis.clock import Clock
from trivet_proto.errors import TrivetError
from trivet_proto.sampling import child_seed

from trivet_scheduler.plan import Delta
from trivet_scheduler.queues import Policy, WaitingQueue
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import NOTHING_DONE, Request, RequestSpec, RequestTable, Resume, Status, end_after


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    steps: int = 0  # sent, and every further iteration of one
    failed_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[Status, int] = field(default_factory=dict)


class RequestBook:
    """Owns the requests, their counters and the waiting queue."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.clock = clock
        self.table = RequestTable()
        self.alive: set[Request] = set()
        self.waiting = WaitingQueue(policy)
        self.totals = Totals()
        self._deltas: list[Delta] = []
        self._arrivals = 0
        self._homes: dict[Request, Replica] = {}  # of those who run
        self._children: dict[Request, list[Request]] = {}  # first child → those who wait for it

    # ---- in ----

    def enter(
        self, spec: RequestSpec, owner: object, handles: Sequence[int], seed: int, limit: int, resume: Sequence[Resume]
    ) -> list[Request]:
        """The children of a prompt, all waiting but those with nothing left to do. `limit` is in tokens, the prompt's included."""
        children = [
            self._child(spec, owner, handle, index, child_seed(seed, index), limit, resume[index] if resume else NOTHING_DONE)
            for index, handle in enumerate(handles)
        ]
        first, *others = children
        for request in children:
            self.alive.add(request)
            self.totals.prompt_tokens += request.num_prompt
            ended = self._ended_before(request, resume[request.child] if resume else NOTHING_DONE)
            if ended is not None:
                request.cached_tokens = 0
                self.finish(request, ended)
                continue
            self.waiting.push(request)
            if request is not first and first in self.waiting:
                request.sibling = first
        if any(request.sibling for request in others):
            self._children[first] = others
        return children

    def _child(self, spec: RequestSpec, owner: object, handle: int, index: int, seed: int, limit: int, resume: Resume) -> Request:
        slot = self.table.take_slot()
        self.table.prompt[slot] = len(spec.prompt)
        self.table.tokens[slot] = len(spec.prompt) + len(resume.output)
        self.table.limit[slot] = limit
        self._arrivals += 1
        return Request(
            spec,
            owner,
            handle,
            index,
            seed,
            self.table,
            slot,
            arrival=self._arrivals,
            arrived_at=self.clock.monotonic(),
            output=list(resume.output),
            cached_reported=resume.cached_tokens_reported,
            prompt_logprobs_done=max(1, len(spec.prompt)) if resume.prompt_logprobs_reported else 1,
            timing_reported=resume.timing_reported,
        )

    def _ended_before(self, request: Request, resume: Resume) -> Status | None:
        """How a request ends that needs no step at all; None when it has something to run."""
        if resume.done:
            return Status.FINISHED_STOPPED
        for count in range(1, len(request.output) + 1):
            status = end_after(request, count, int(self.table.limit[request.slot]))
            if status is not None:
                return status
        if request.samples_nothing and not request.wants_prompt_logprobs:
            return Status.FINISHED_LENGTH
        return None

    # ---- to and from a replica ----

    def replica_of(self, request: Request) -> Replica | None:
        """Where it runs; None when it does not."""
        return self._homes.get(request)

    def start(self, request: Request, replica: Replica) -> None:
        """From the queue to a replica, under a handle that the worker has not seen."""
        assert request not in self._homes, "a request runs on one replica"
        self.waiting.remove(request)
        self._homes[request] = replica
        request.status = Status.RUNNING
        request.worker_handle = replica.next_handle()
        replica.add_running(request)

    def preempt(self, request: Request) -> None:
        """Take its blocks; it computes again when its turn comes, with the tokens it has."""
        self.totals.preemptions += 1
        self._leave(request)
        self._requeue(request)

    def lose(self, replica: Replica) -> None:
        """The replica is gone, its steps and blocks with it: what ran there goes back to the places that arrival gives."""
        for flight in replica.flights:
            for request in flight.requests:
                request.steps_in_flight = 0
                self.waiting.unblock(request)
        replica.flights.clear()
        for request in list(replica.running):
            replica.remove_running(request)
            del self._homes[request]
            request.block_table = []
            self._requeue(request)

    def _leave(self, request: Request) -> None:
        """Off its replica; its blocks are free when the last step that names it is answered."""
        replica = self._homes.pop(request, None)
        if replica is None:
            return
        replica.remove_running(request)
        replica.finished_handles.append(request.worker_handle)
        replica.free_when_answered(request)

    def _requeue(self, request: Request) -> None:
        table, slot = self.table, request.slot
        table.computed[slot] = table.durable[slot] = table.pending[slot] = table.blocks[slot] = 0
        request.named_blocks = 0
        request.worker_handle = 0
        request.status = Status.PREEMPTED
        self.waiting.push(request)

    # ---- children of one prompt ----

    def waits_for_sibling(self, request: Request) -> bool:
        return request.sibling is not None and request.sibling in self._children

    def is_waited_for(self, request: Request) -> bool:
        return request in self._children

    def release_children(self, first: Request) -> None:
        """What they share is computed, or never will be."""
        for child in self._children.pop(first, ()):
            self.waiting.unblock(child)

    # ---- out ----

    def fail(self, request: Request, error: TrivetError, delta: Delta | None = None) -> None:
        """End one request with an error of its own."""
        if not request.status.is_finished:
            request.error = error
            self.finish(request, Status.FINISHED_ERROR, delta)

    def finish(self, request: Request, status: Status, delta: Delta | None = None) -> None:
        """The one way out: exactly one delta carries the finish. Without one given it is a delta of its own."""
        assert not request.status.is_finished, "a request ends once"
        self._leave(request)
        self.waiting.remove(request)
        self.release_children(request)
        request.status = status
        request.worker_handle = 0
        self.table.free_slot(request.slot)
        self.alive.discard(request)
        self.totals.finished[status] = self.totals.finished.get(status, 0) + 1
        if delta is None:
            delta = Delta(request)
            self.report(delta)
        delta.finish = status

    def report(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def take_deltas(self) -> list[Delta]:
        """What is new since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas
