"""The scheduler under random fire: any order of arrivals, ends, answers, failures, losses and returns keeps its promises.

The rules are what can happen to a scheduler; the invariants are recounted after each from what is known outside it. Its requests' tokens
are compared in the end with those of a run in which nothing went wrong.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, outcome
from pool_machine import pool_state
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.sampling import child_seed
from trivet_scheduler.core import Scheduler
from trivet_scheduler.core.answers import MOST_FAILURES
from trivet_scheduler.plan import StepOutcome, StepPlan, StepStatus
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Resume, Status

CONTEXT = 10_000
MOST_FAILURES_IN_A_ROW = MOST_FAILURES - 1  # one more and a request alone in its step is given up
MOST_WAITING, MOST_WAITING_TOKENS = 12, 150
SEED = 11
STOP_IDS = frozenset(range(0, 1000, 12))  # about one token in twelve

Pick = st.integers(0, 1000)
Bits = st.integers(0, (1 << 24) - 1)


@dataclass
class Site:
    """A place for a replica: there is one or it is lost."""

    name: str
    num_blocks: int
    budget: int
    seqs: int
    replica: Replica | None = None
    worker: ModelWorker = field(default_factory=ModelWorker)
    in_flight: list[StepPlan] = field(default_factory=list)
    broken_step: int | None = None
    failures: int = 0

    def start(self, scheduler: Scheduler) -> None:
        self.replica = make_replica(self.num_blocks, seqs=self.seqs, tokens=self.budget, name=self.name)
        self.worker, self.in_flight, self.broken_step, self.failures = ModelWorker(), [], None, 0
        _check_refusals(self.replica)
        scheduler.attach(self.replica)


def _check_refusals(replica: Replica) -> None:
    """A refused allocation changes nothing."""
    kv = replica.kv
    allocate, grow = kv.allocate, kv.grow

    def checked_allocate(*arguments: object) -> list[int] | None:
        before = pool_state(kv.pool)
        blocks = allocate(*arguments)  # type: ignore[arg-type]
        assert blocks is not None or pool_state(kv.pool) == before
        return blocks

    def checked_grow(table: list[int], count: int) -> list[int] | None:
        before = pool_state(kv.pool), list(table)
        blocks = grow(table, count)
        assert blocks is not None or (pool_state(kv.pool), table) == before
        return blocks

    kv.allocate, kv.grow = checked_allocate, checked_grow  # type: ignore[method-assign]


@dataclass(frozen=True)
class Asked:
    """What a request must come to when nobody ends it before."""

    output: list[int]
    delivered: int
    finish: Status


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, one to three sites."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        steps_in_flight=st.sampled_from([1, 2]),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 3]),
        watermark=st.sampled_from([0.0, 0.1]),
        most_active=st.sampled_from([None, 3]),
        run_ahead=st.sampled_from([1, 3, 9]),
        sites=st.lists(st.tuples(st.integers(5, 28), st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=3),
    )
    def start(self, policy, steps_in_flight, caching, threshold, watermark, most_active, run_ahead, sites) -> None:
        self.scheduler = make_scheduler(
            policy=policy,
            steps_in_flight=steps_in_flight,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            max_num_active_seqs=most_active,
            max_waiting_requests=MOST_WAITING,
            max_waiting_tokens=MOST_WAITING_TOKENS,
            run_ahead=run_ahead,
        )
        self.most_active = most_active
        self.sites = [Site(f"site {index}", *site) for index, site in enumerate(sites)]
        self.largest = max(site.num_blocks - 1 for site in self.sites) * BLOCK
        self.seen, self.asked = Collected(), {}
        self.handles = 0
        self.ended_by_us: dict[Request, Status] = {}
        for site in self.sites:
            site.start(self.scheduler)

    # ---- requests ----

    @rule(length=st.integers(1, 24), bits=Bits, count=st.integers(0, 24), flavour=st.integers(0, 255), delivered=st.integers(0, 10))
    def add(self, length: int, bits: int, count: int, flavour: int, delivered: int) -> None:
        self.add_one(_prompt(length, bits), count, max(1, flavour % 5 - 1), flavour, delivered)

    def add_one(self, prompt: list[int], count: int, children: int, flavour: int, delivered: int) -> None:
        """The bits of `flavour` say what is special about it; most have few of them."""
        stops, reports, salted = flavour & 3 == 3, flavour & 12 == 12, flavour & 48 == 48
        is_resumed, expires = flavour & 192 == 192, flavour & 72 == 72
        spec = make_spec(
            prompt,
            count,
            children=children,
            stop_ids=STOP_IDS if stops else frozenset(),
            min_tokens=flavour % 5 if stops else 0,
            priority=flavour % 3,
            salt=b"salt" if salted else b"",
            uid=self.handles.to_bytes(16, "little"),
            deadline=self.scheduler._clock.monotonic() + 30 + flavour if expires else None,
            **({"prompt_logprobs": 0} if reports else {}),
        )
        handles = list(range(self.handles + 1, self.handles + 1 + children))
        self.handles += children
        wanted = [self._wanted(prompt, seed, spec) for seed in _seeds(children)]
        resume = [Resume(output[:delivered], prompt_logprobs_reported=delivered > 0) for output, _ in wanted] if is_resumed else []
        waiting, waiting_tokens = len(self.scheduler.waiting), self.scheduler.waiting.num_uncached_tokens
        tokens = len(prompt) * children + sum(len(had.output) for had in resume)
        is_overload = waiting + children > MOST_WAITING or (waiting > 0 and waiting_tokens + tokens > MOST_WAITING_TOKENS)
        is_too_long = bool(self.scheduler.replicas) and len(prompt) > self.scheduler.capacity_tokens
        if is_overload or is_too_long:
            before = len(self.scheduler.requests)
            with pytest.raises(TrivetError) as refused:
                self.scheduler.add(spec, None, handles, SEED, CONTEXT, resume)
            assert refused.value.kind is (ErrorKind.INVALID_ARGUMENT if is_too_long else ErrorKind.OVERLOADED)
            assert len(self.scheduler.requests) == before
            return
        requests = self.scheduler.add(spec, None, handles, SEED, CONTEXT, resume)
        for request, (output, finish), had in zip(requests, wanted, resume or [Resume()] * children, strict=True):
            self.asked[request] = Asked(output, len(had.output), finish)
        self.seen.take(self.scheduler)

    def _wanted(self, prompt, seed, spec) -> tuple[list[int], Status]:
        output = expected_output(prompt, seed, spec.sampling.max_tokens)
        for index, token in enumerate(output):
            if token in spec.stop_ids and index + 1 > spec.min_tokens:
                return output[: index + 1], Status.FINISHED_STOPPED
        return output, Status.FINISHED_LENGTH

    @precondition(lambda self: self.scheduler.requests)
    @rule(pick=Pick, stops=st.booleans())
    def end_one(self, pick: int, stops: bool) -> None:
        alive = sorted(self.scheduler.requests, key=lambda request: request.handle)
        request = alive[pick % len(alive)]
        self.ended_by_us[request] = Status.FINISHED_STOPPED if stops else Status.FINISHED_ABORTED
        (self.scheduler.stop if stops else self.scheduler.abort)(request)
        self.seen.take(self.scheduler)

    @rule(length=st.integers(1, 12), bits=Bits, count=st.integers(1, 16))
    def add_several(self, length: int, bits: int, count: int) -> None:
        """Plain ones, as most are."""
        for shift in range(2 + bits % 3):
            self.add_one(_prompt(length + shift, bits >> shift), count, 1, 0, 0)

    # ---- steps ----

    def present(self) -> list[Site]:
        return [site for site in self.sites if site.replica is not None]

    def pick(self, pick: int) -> Site | None:
        present = self.present()
        return present[pick % len(present)] if present else None

    @rule(pick=Pick)
    def send(self, pick: int) -> None:
        site = self.pick(pick)
        if site is not None:
            self.send_step(site)

    def send_step(self, site: Site) -> StepPlan | None:
        replica, waiting = site.replica, self.scheduler.waiting
        assert replica is not None
        budget, was_draining, had = replica.token_budget, replica.draining, set(replica.running)
        ends_one = replica.runs_ahead
        plan = self.scheduler.schedule(replica)
        self.seen.take(self.scheduler)  # who outgrew everything ends here
        if plan is None:
            return None
        assert int(not ends_one) <= plan.num_tokens <= min(budget, site.budget)
        assert len(site.in_flight) < (2 if ends_one else self.scheduler.settings.steps_in_flight)
        if plan.run_ahead > 1:
            assert not ends_one
            assert not plan.new
            assert not plan.finished_handles
            assert self.scheduler.paused or was_draining or not len(waiting)
            assert len(plan.known_handles) == len(replica.running)
            assert 1 < plan.run_ahead <= self.scheduler.settings.run_ahead
        assert len(replica.running) <= min(site.seqs, self.most_active or site.seqs)
        started = [work.request for work in plan.new]
        assert set(started) == set(replica.running) - had
        assert not (started and (was_draining or self.scheduler.paused))
        assert all(work.num_scheduled > 0 for work in plan.new)
        assert (plan.known_scheduled > 0).all()
        turns = [self.turn(request) for request in started]
        assert turns == sorted(turns), "the queue's order"
        left = [request for request in waiting._waiting if not request.steps_in_flight]
        if turns and len(self.present()) == 1:
            assert all(self.turn(request) > turns[-1] for request in left), "nobody is passed over"
        site.in_flight.append(plan)
        return plan

    @rule(turns=st.integers(1, 3))
    def let_it_run(self, turns: int) -> None:
        """As it goes most of the time: steps are sent as far as they may be, and answered in order."""
        for _ in range(turns):
            for site in self.present():
                while self.send_step(site) is not None:
                    pass
            for site in self.present():
                if site.in_flight:
                    self.answer_step(site)

    def turn(self, request: Request) -> tuple[int, int]:
        """Its place in the queue, whether it came back there or not: handles rise with arrival."""
        return request.spec.priority if self.scheduler.settings.policy == "priority" else 0, request.handle

    @precondition(lambda self: any(site.in_flight for site in self.present()))
    @rule(pick=Pick)
    def answer(self, pick: int) -> None:
        busy = [site for site in self.present() if site.in_flight]
        self.answer_step(busy[pick % len(busy)])

    @precondition(lambda self: any(site.in_flight for site in self.present()))
    @rule(pick=Pick, fate=st.sampled_from(["fails", "broken"]))
    def go_wrong(self, pick: int, fate: str) -> None:
        """A step that fails, or a row whose logits are not finite."""
        busy = [site for site in self.present() if site.in_flight]
        site = busy[pick % len(busy)]
        while pick % 2 and self.send_step(site) is not None:
            pass  # the next ones are in flight then
        self.answer_step(site, fate)

    def answer_step(self, site: Site, fate: str = "done") -> None:
        plan = site.in_flight[0]
        assert site.replica is not None
        if site.broken_step is not None and plan.resync != site.broken_step:
            site.in_flight.pop(0)
            self.scheduler.update(site.replica, site.worker.skip(plan))
        elif fate == "fails" and site.failures < MOST_FAILURES_IN_A_ROW:
            site.broken_step = plan.number
            site.failures += 1
            site.in_flight.pop(0)
            self.scheduler.update(site.replica, site.worker.run(plan, fail=True))
        else:
            site.broken_step, site.failures = None, 0
            result = self._run(site, plan, fate)
            if result.is_last:
                site.in_flight.pop(0)
            self.scheduler.update(site.replica, result)
        self.seen.take(self.scheduler)

    def _run(self, site: Site, plan: StepPlan, fate: str) -> StepOutcome:
        flight = site.replica.flights[0]  # type: ignore[union-attr]
        broken = frozenset(flight.handles[:1]) if fate == "broken" else frozenset()
        # It runs ahead until it is told otherwise, or finds a token that ends a request, as far as it knows.
        ends = len(site.in_flight) > 1 or hash((plan.number, flight.answered)) % 5 == 0
        result = site.worker.run(plan, broken=broken, ends=ends)
        if any(result.flags) and not flight.requests[0].status.is_finished:
            self.ended_by_us[flight.requests[0]] = Status.FINISHED_ERROR
        return result

    @rule(pick=Pick, off=st.sampled_from([-2, -1, 1, 2]), status=st.sampled_from(list(StepStatus)))
    def answer_what_was_not_asked(self, pick: int, off: int, status: StepStatus) -> None:
        """An earlier step, one that was never sent, other requests than the step's, other tokens than it gives."""
        site = self.pick(pick)
        if site is None:
            return
        number = site.in_flight[0].number + off if site.in_flight else 10_000
        self._refused(site, outcome(number, status, [], [], []))
        if not site.in_flight:
            return
        flight = site.replica.flights[0]  # type: ignore[union-attr]
        count = len(flight.handles)
        tokens = [5] * int(flight.samples.sum())
        plain = outcome(flight.number, StepStatus.DONE, flight.handles, flight.samples.astype(int).tolist(), tokens)
        if not flight.undone:
            self._refused(site, replace(plain, iteration=flight.answered + 1))
            self._refused(
                site, replace(plain, iteration=flight.answered, is_last=False) if flight.left == 1 else replace(plain, iteration=99)
            )
        self._refused(site, outcome(flight.number, StepStatus.DONE, [77_777] * count, [0] * count, []))
        if not flight.requests[-1].status.is_finished and not flight.undone:
            counts = [0] * (count - 1) + [int(not flight.samples[-1])]
            self._refused(site, outcome(flight.number, StepStatus.DONE, flight.handles, counts, [5] * sum(counts)))
        if not flight.undone:
            self._refused(site, outcome(flight.number, StepStatus.SKIPPED, [], [], []))

    def _refused(self, site: Site, wrong: StepOutcome) -> None:
        before = self._snapshot(site.replica)
        with pytest.raises(TrivetError) as refused:
            self.scheduler.update(site.replica, wrong)
        assert refused.value.kind is ErrorKind.ABORTED
        assert self._snapshot(site.replica) == before
        assert not self.scheduler.take_deltas()

    def _snapshot(self, replica: Replica) -> tuple[object, ...]:
        table = self.scheduler.table
        columns = [getattr(table, name).tolist() for name in table.COLUMNS]
        requests = sorted((request.handle, request.status.name, list(request.output)) for request in self.scheduler.requests)
        flights = [(flight.number, flight.undone, flight.answered) for flight in replica.flights]
        return columns, requests, flights, pool_state(replica.kv.pool), replica.token_budget, replica.resync

    # ---- replicas ----

    @rule(pick=Pick, what=st.sampled_from(["lose", "drain", "return", "return", "let go"]))
    def change_the_replicas(self, pick: int, what: str) -> None:
        site = self.sites[pick % len(self.sites)]
        if what == "return" and site.replica is None:
            site.start(self.scheduler)
        elif what == "lose" and site.replica is not None:
            self.lose(site)
        elif what == "drain" and site.replica is not None:
            self.scheduler.drain(site.replica)
        elif what == "let go":
            for drained in self.present():
                if self.scheduler.is_drained(drained.replica):
                    assert not drained.in_flight
                    self.lose(drained)

    def lose(self, site: Site) -> None:
        assert site.replica is not None
        ran = list(site.replica.running)
        self.scheduler.detach(site.replica)
        site.replica = None
        assert all(request in self.scheduler.waiting and request.status is Status.PREEMPTED for request in ran)

    @rule(seconds=st.integers(1, 60), what=st.sampled_from(["time", "pause", "resume", "forget", "forget and preempt"]))
    def interfere(self, seconds: int, what: str) -> None:
        """Time passes, or an operator has a wish."""
        if what == "time":
            self._let_time_pass(seconds)
        elif what in ("pause", "resume"):
            self.scheduler.paused = what == "pause"
        else:
            self.scheduler.reset_prefix_cache(preempt_running=what == "forget and preempt")
            assert not any(site.replica.kv.pool._by_hash for site in self.present())

    def _let_time_pass(self, seconds: int) -> None:
        self.scheduler._clock.advance(seconds)
        now = self.scheduler._clock.monotonic()
        for request in self.scheduler.requests:
            if request.spec.deadline is not None and request.spec.deadline <= now:
                self.ended_by_us[request] = Status.FINISHED_ERROR
        self.scheduler.expire()
        self.seen.take(self.scheduler)

    # ---- what always holds ----

    @invariant()
    def every_block_is_held_cached_or_free_exactly_once(self) -> None:
        for site in self.present():
            replica, pool = site.replica, site.replica.kv.pool
            pool.check()
            expected = [0] * pool.num_blocks
            for table in [request.block_table for request in replica.running] + [held.blocks for held in replica.held_back]:
                for block in table:
                    expected[block] += 1
            assert pool._references == expected
            for held in replica.held_back:
                assert any(flight.number == held.last_step for flight in replica.flights), "held back for a step that is answered"

    @invariant()
    def nobody_runs_beyond_its_blocks(self) -> None:
        table = self.scheduler.table
        for site in self.present():
            for request in site.replica.running:
                slot = request.slot
                assert table.blocks[slot] == len(request.block_table)
                assert table.computed[slot] <= len(request.block_table) * BLOCK
                assert 0 <= table.durable[slot] <= table.computed[slot] <= table.tokens[slot] + table.pending[slot]
                assert table.tokens[slot] == request.num_prompt + len(request.output)
                assert request.named_blocks * BLOCK <= table.durable[slot]

    @invariant()
    def a_named_block_holds_what_its_name_says(self) -> None:
        """It was written in full, and equal names mean equal content."""
        for site in self.present():
            content: dict[bytes, object] = {}
            for block, name in enumerate(site.replica.kv.pool._hashes):
                if name is not None:
                    slots = site.worker.content[block]
                    assert all(token >= 0 for token, _ in slots), "a block that was not written can be found"
                    assert content.setdefault(name, slots) == slots

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        for request in self.scheduler.requests:
            homes = [site.replica for site in self.present() if request in site.replica.running]
            assert homes == ([] if request in self.scheduler.waiting else [self.scheduler.replica_of(request)])
            assert request not in self.seen.finishes
        assert len(self.scheduler.requests) == len(self.scheduler.waiting) + self.scheduler.num_running

    # ---- the end ----

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.paused = False
        for site in self.sites:
            if site.replica is not None and site.replica.draining:
                self.lose(site)
            if site.replica is None:
                site.start(self.scheduler)
        self._run_to_the_end()
        assert set(self.seen.finishes) == set(self.asked)
        for request, asked in self.asked.items():
            self._check_end(request, asked)
        assert not self.scheduler.requests
        assert not len(self.scheduler.waiting)
        assert self.scheduler.waiting.num_uncached_tokens == 0
        for site in self.sites:
            assert site.replica.kv.pool.num_held == 0
            site.replica.kv.pool.check()

    def _run_to_the_end(self) -> None:
        idle = 0
        for _ in range(20_000):
            moved = False
            for site in self.sites:
                while self.send_step(site) is not None:
                    moved = True
            for site in self.sites:
                if site.in_flight:
                    self.answer_step(site)
                    moved = True
            self.every_block_is_held_cached_or_free_exactly_once()
            idle = 0 if moved else idle + 1
            if idle == 2:
                break
        assert not self.scheduler.requests, "somebody is left behind"

    def _check_end(self, request: Request, asked: Asked) -> None:
        (finish,) = self.seen.finishes[request]
        tokens, expected = self.seen.tokens.get(request, []), asked.output[asked.delivered :]
        if request in self.ended_by_us:
            assert finish is self.ended_by_us[request]
            assert tokens == expected[: len(tokens)]
            return
        if finish is Status.FINISHED_ERROR and request.error.kind is ErrorKind.INTERNAL:
            # A site fails seldom in a row, but this request may have been in none of the steps between.
            assert request.failures >= MOST_FAILURES
            assert tokens == expected[: len(tokens)]
        elif (tokens, finish) != (expected, asked.finish):
            # No cache was large enough, at a time when the largest was away perhaps.
            smallest = min(site.num_blocks - 1 for site in self.sites) * BLOCK
            assert request.num_prompt + asked.delivered + len(tokens) > smallest
            assert tokens == expected[: len(tokens)]
            has_output = asked.delivered + len(tokens) > 0
            assert finish is (Status.FINISHED_LENGTH if has_output else Status.FINISHED_ERROR)


def _prompt(length: int, bits: int) -> list[int]:
    """Of two tokens, so that prefixes are often shared."""
    return [bits >> index & 1 for index in range(length)]


def _seeds(children: int) -> list[int]:
    return [child_seed(SEED, index) for index in range(children)]
