"""The core under random fire: any order of arrivals, ends, answers, failures and losses keeps its promises."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_worker import Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, outcome, run_until_idle
from trivet_scheduler.plan import StepPlan, StepStatus
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

CONTEXT = 10_000
MOST_FAILURES_IN_A_ROW = 3  # one more and a request alone in its step is given up, which is another test's matter


class SchedulerUnderFire(RuleBasedStateMachine):
    """One replica at a time; its worker keeps what every block holds."""

    @initialize(
        steps_in_flight=st.sampled_from([1, 2]),
        num_blocks=st.integers(12, 40),
        budget=st.integers(1, 24),
        caching=st.booleans(),
    )
    def start(self, steps_in_flight: int, num_blocks: int, budget: int, caching: bool) -> None:
        self.scheduler = make_scheduler(steps_in_flight=steps_in_flight, enable_prefix_caching=caching)
        self.num_blocks, self.budget = num_blocks, budget
        self.seen, self.asked = Collected(), {}
        self.handles = self.failures = 0
        self.attach()

    def attach(self) -> None:
        self.replica: Replica = make_replica(self.num_blocks, seqs=6, tokens=self.budget)
        self.worker = ModelWorker()
        self.in_flight: list[StepPlan] = []
        self.broken: int | None = None
        self.scheduler.attach(self.replica)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24), count=st.integers(1, 16), children=st.integers(1, 3))
    def add(self, prompt: list[int], count: int, children: int) -> None:
        handles = list(range(self.handles + 1, self.handles + 1 + children))
        self.handles += children
        for request in self.scheduler.add(make_spec(prompt, count, children=children), None, handles, self.handles, CONTEXT):
            self.asked[request] = (prompt, count)

    @rule()
    def send(self) -> None:
        plan = self.scheduler.schedule(self.replica)
        if plan is not None:
            assert 0 < plan.num_tokens <= self.budget
            self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def answer(self, fails: bool) -> None:
        plan = self.in_flight.pop(0)
        if self.broken is not None and plan.resync != self.broken:
            self.worker.run(plan, fail=True)  # what it says of requests holds, nothing of it is run
            self.scheduler.update(self.replica, outcome(plan.number, StepStatus.SKIPPED, [], [], []))
        elif fails and self.failures < MOST_FAILURES_IN_A_ROW:
            self.broken = plan.number
            self.failures += 1
            self.scheduler.update(self.replica, self.worker.run(plan, fail=True))
        else:
            self.broken, self.failures = None, 0
            self.scheduler.update(self.replica, self.worker.run(plan))
        self.seen.take(self.scheduler)

    @precondition(lambda self: self.scheduler.requests)
    @rule(choice=st.randoms(use_true_random=False), stops=st.booleans())
    def end_one(self, choice: object, stops: bool) -> None:
        request = choice.choice(sorted(self.scheduler.requests, key=lambda request: request.handle))
        (self.scheduler.stop if stops else self.scheduler.abort)(request)
        self.seen.take(self.scheduler)

    @rule()
    def lose_the_replica(self) -> None:
        self.scheduler.detach(self.replica)
        self.attach()

    @rule()
    def reset_the_cache(self) -> None:
        self.scheduler.reset_prefix_cache(preempt_running=self.handles % 2 == 0)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.replica.kv.pool.check()
        for request in self.replica.running:
            table = self.scheduler.table
            assert table.blocks[request.slot] == len(request.block_table)
            assert table.computed[request.slot] <= len(request.block_table) * self.replica.kv.block_size
            assert 0 <= table.durable[request.slot] <= table.computed[request.slot]

    @invariant()
    def everybody_is_somewhere(self) -> None:
        for request in self.scheduler.requests:
            assert (request in self.scheduler.waiting) != (request in self.replica.running), request.status

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.answer(False)
        # A step that follows a failure is run like any other.
        run_until_idle(self.scheduler, self.replica, self.worker, self.seen)
        for request, (prompt, count) in self.asked.items():
            self.check_end(request, prompt, count)
        assert self.replica.kv.pool.num_held == 0
        assert not self.scheduler.requests
        assert not len(self.scheduler.waiting)

    def check_end(self, request: Request, prompt: list[int], count: int) -> None:
        (finish,) = self.seen.finishes[request]
        expected = expected_output(prompt, request.seed, count)
        tokens = self.seen.tokens[request]
        if finish is Status.FINISHED_LENGTH:
            assert tokens == expected
        else:
            assert finish in (Status.FINISHED_ABORTED, Status.FINISHED_STOPPED)
            assert tokens == expected[: len(tokens)]


SchedulerUnderFire.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSchedulerUnderFire = SchedulerUnderFire.TestCase
