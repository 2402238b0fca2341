"""The scheduler: what a step is made of, in order, and what its answer sets off.

All requests of all replicas: one waiting queue, a running list per replica. The rooms beside this one do one thing each; here is the
order in which they act.
"""

from collections.abc import Sequence

from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_scheduler.core.admission import Admission
from trivet_scheduler.core.answers import Answers
from trivet_scheduler.core.book import RequestBook, Totals
from trivet_scheduler.core.departure import depart
from trivet_scheduler.core.growth import Growth
from trivet_scheduler.core.intake import check_intake, token_limit
from trivet_scheduler.core.placement import Placement, capacity_tokens
from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.core.run_ahead import RunAhead
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.plan import Delta, StepOutcome, StepPlan, StepStatus
from trivet_scheduler.queues import WaitingQueue
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, RequestSpec, RequestTable, Resume, Status


class Scheduler:
    """The core's one face. Synchronous; whoever calls it sends the plans and hands out the deltas."""

    def __init__(self, settings: CoreSettings, clock: Clock) -> None:
        self.settings = settings
        self.replicas: list[Replica] = []
        self.paused = False
        self._clock = clock
        self._book = RequestBook(settings.policy, clock)
        prefixes = Prefixes(shared_between_requests=settings.enable_prefix_caching)
        placement = Placement(settings, self._book.table, prefixes, self.replicas)
        self._growth = Growth(settings, self._book)
        self._run_ahead = RunAhead(settings, self._book)
        self._admission = Admission(settings, self._book, prefixes, placement, self.replicas)
        self._answers = Answers(self._book, prefixes, self.replicas)

    # ---- what there is ----

    @property
    def requests(self) -> set[Request]:
        """Those that have not ended."""
        return self._book.alive

    @property
    def waiting(self) -> WaitingQueue:
        return self._book.waiting

    @property
    def table(self) -> RequestTable:
        return self._book.table

    @property
    def totals(self) -> Totals:
        return self._book.totals

    @property
    def num_running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas)

    @property
    def capacity_tokens(self) -> int:
        """What one request can hold at most, on the largest replica that admits requests; 0 when there is none."""
        return capacity_tokens(self.replicas)

    def replica_of(self, request: Request) -> Replica | None:
        """Where it runs; None when it does not."""
        return self._book.replica_of(request)

    # ---- replicas ----

    def attach(self, replica: Replica) -> None:
        self.replicas.append(replica)

    def detach(self, replica: Replica) -> None:
        """The replica is lost: what ran there goes back to the queue, to the places that arrival gives, and its answers count no more."""
        self.replicas.remove(replica)
        self._book.lose(replica)

    def drain(self, replica: Replica) -> None:
        """Admit nothing more there; what runs there goes on. `detach` requeues what is left when the time for that is over."""
        replica.draining = True

    def is_drained(self, replica: Replica) -> bool:
        """Whether it drains and nothing is left that it would have to answer."""
        return replica.draining and not replica.running and not replica.flights

    # ---- requests ----

    def add(
        self,
        spec: RequestSpec,
        owner: object,
        handles: Sequence[int],
        seed: int,
        max_model_len: int,
        resume: Sequence[Resume] = (),
    ) -> list[Request]:
        """Admit the children of a prompt, all or none; `resume` says for each what it had already, or is empty.

        Raises INVALID_ARGUMENT for what can never run, OVERLOADED for what cannot wait.
        """
        check_intake(spec, resume, max_model_len, self.settings, self.waiting, self.replicas)
        return self._book.enter(spec, owner, handles, seed, token_limit(spec, max_model_len), resume)

    def stop(self, request: Request) -> None:
        """Its text is complete: the frontend found a stop string."""
        if not request.status.is_finished:
            self._book.finish(request, Status.FINISHED_STOPPED)

    def abort(self, request: Request) -> None:
        if not request.status.is_finished:
            self._book.finish(request, Status.FINISHED_ABORTED)

    def fail(self, request: Request, error: TrivetError) -> None:
        """End one request with an error of its own."""
        self._book.fail(request, error)

    def expire(self) -> None:
        """End the requests whose time has run out, waiting or running."""
        now = self._clock.monotonic()
        late = [request for request in self.requests if request.spec.deadline is not None and request.spec.deadline <= now]
        for request in late:
            self.fail(request, TrivetError(ErrorKind.DEADLINE_EXCEEDED, "the request's time ran out before it was finished"))

    def reset_prefix_cache(self, *, preempt_running: bool) -> int:
        """Forget all cached prefixes; what runs keeps its own blocks unless it is preempted first."""
        for replica in self.replicas if preempt_running else ():
            for request in list(replica.running):
                self._book.preempt(request)
        return sum(replica.kv.reset() for replica in self.replicas)

    # ---- the step ----

    def schedule(self, replica: Replica) -> StepPlan | None:
        """The next step of a replica; None when there is nothing to run or enough is in flight."""
        if not self._may_send(replica):
            return None
        self._growth.part_with_outgrown(replica)
        preemptions = self.totals.preemptions
        known = self._growth.grow(replica)
        new: list[tuple[Request, int]] = []
        # Whoever had to give up blocks comes first, so a step that preempts admits nobody.
        if self.totals.preemptions == preemptions and not self.paused:
            new = self._admission.admit(replica, replica.token_budget - known.num_tokens)
        if not known.requests and not new and not replica.runs_ahead:
            return None
        # Whoever waits is looked at with each step, so nothing runs ahead of that.
        iterations = 1 if new or self._has_news(replica) else self._run_ahead.iterations(replica, known)
        return depart(self._book, replica, known, new, iterations)

    def _may_send(self, replica: Replica) -> bool:
        """Fewer steps are in flight than may be; behind one that runs ahead none is sent but to end it."""
        if replica.runs_ahead:
            return len(replica.flights) < replica.limits.steps_in_flight and self._has_news(replica)
        return len(replica.flights) < min(self.settings.steps_in_flight, replica.limits.steps_in_flight)

    def _has_news(self, replica: Replica) -> bool:
        """Somebody has left that replica, or waits and may come to it."""
        may_come = len(self.waiting) > 0 and not self.paused and not replica.draining
        return may_come or bool(replica.finished_handles)

    def update(self, replica: Replica, outcome: StepOutcome) -> None:
        """Take in a step's answer. Raises ABORTED, and changes nothing, when it answers no step in flight or does not fit it."""
        flight = self._answers.check(replica, outcome)
        seconds = replica.step_age(self._clock.monotonic()) or 0.0
        replica.note_answer(self._clock.monotonic())
        if outcome.is_last:
            replica.flights.popleft()
            for request in flight.requests:
                request.steps_in_flight -= 1
        if outcome.status is StepStatus.DONE:
            self.totals.steps += outcome.iteration > 0  # the first was counted when the step left
            replica.forecast.observe(flight.num_tokens, seconds)
            replica.token_budget = min(replica.token_budget * 2, replica.limits.max_num_batched_tokens)
            self._answers.take_in(replica, flight, outcome)
        elif outcome.status is StepStatus.FAILED:
            self._answers.undo(replica, flight, outcome.error)
        if not outcome.is_last:
            return
        replica.free_answered(outcome.number)
        for request in flight.requests:
            if request.status is Status.PREEMPTED and not request.steps_in_flight:
                self.waiting.unblock(request)

    def take_deltas(self) -> list[Delta]:
        """What is new since the last call, in order."""
        return self._book.take_deltas()
