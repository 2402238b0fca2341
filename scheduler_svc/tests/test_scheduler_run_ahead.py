"""Several tokens from one step: what is given ahead, what ends it, and what is taken back when it ended early."""

import pytest
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, run_until_idle
from trivet_scheduler.core import Scheduler
from trivet_scheduler.plan import StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

CONTEXT = 10_000
SEED = 7


class Scene:
    """One replica whose requests have had their first token; `plan` runs ahead."""

    def __init__(self, prompts: list[list[int]], *, count: int = 40, run_ahead: int = 6, num_blocks: int = 100, **settings: object) -> None:
        self.scheduler: Scheduler = make_scheduler(run_ahead=run_ahead, **settings)
        self.replica: Replica = make_replica(num_blocks)
        self.worker, self.seen = ModelWorker(), Collected()
        self.in_flight: list[StepPlan] = []
        self.scheduler.attach(self.replica)
        self.requests = [self.add(prompt, index, count) for index, prompt in enumerate(prompts)]
        self.first = self.send()
        self.answer(self.first)
        self.plan = self.send()

    def add(self, prompt: list[int], handle: int, count: int = 40) -> Request:
        return self.scheduler.add(make_spec(prompt, count), None, [handle], SEED, CONTEXT)[0]

    def send(self) -> StepPlan:
        plan = self.scheduler.schedule(self.replica)
        assert plan is not None
        self.in_flight.append(plan)
        return plan

    def answer(self, plan: StepPlan, *, ends: bool = False, fail: bool = False) -> bool:
        result = self.worker.run(plan, ends=ends, fail=fail)
        self.scheduler.update(self.replica, result)
        self.seen.take(self.scheduler)
        if result.is_last:
            self.in_flight.remove(plan)
        return result.is_last

    def finish(self) -> None:
        """All that is left, and no token is lost, repeated or wrong."""
        while self.in_flight:
            self.answer(self.in_flight[0])
        run_until_idle(self.scheduler, self.replica, self.worker, self.seen)
        assert self.replica.kv.pool.num_held == 0


def test_decodes_run_ahead_with_blocks_for_all_iterations_and_no_step_is_sent_meanwhile() -> None:
    scene = Scene([[1, 2, 3], [4, 5]])
    assert scene.plan.run_ahead == 6
    for request in scene.requests:
        assert len(request.block_table) * BLOCK >= request.num_tokens - 1 + 6
    for iteration in range(4):
        assert scene.scheduler.schedule(scene.replica) is None
        assert not scene.answer(scene.plan)
        assert all(len(scene.seen.tokens[request]) == 2 + iteration for request in scene.requests)
    assert not scene.answer(scene.plan)
    assert scene.answer(scene.plan), "the sixth is the last"
    scene.finish()


def test_the_next_step_is_sent_while_the_last_iteration_runs() -> None:
    scene = Scene([[1, 2, 3]])
    for _ in range(5):
        assert scene.scheduler.schedule(scene.replica) is None
        scene.answer(scene.plan)
    following = scene.send()
    assert following.run_ahead == 6
    assert following.known_computed.tolist() == [3 + 6]
    assert scene.answer(scene.plan)


def test_with_one_step_in_flight_the_next_waits_for_the_last_iteration() -> None:
    scene = Scene([[1, 2, 3]], steps_in_flight=1)
    while not scene.answer(scene.plan):
        assert scene.scheduler.schedule(scene.replica) is None
    assert scene.send().run_ahead == 6


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_that_comes_ends_it_and_starts_with_the_next_step(steps_in_flight: int) -> None:
    scene = Scene([[1, 2, 3]], steps_in_flight=steps_in_flight)
    scene.answer(scene.plan)
    late = scene.add([9, 9], 9, 8)
    ending = scene.send()
    assert [work.request for work in ending.new] == [late]
    assert ending.run_ahead == 1
    assert ending.known_computed.tolist() == [3 + 6], "as if all iterations ran"
    assert scene.answer(scene.plan, ends=True)
    (early,) = scene.requests
    table = scene.scheduler.table
    assert table.computed[early.slot] == early.num_tokens - 1 + 1, "four of the six were taken back; the step behind counts"
    assert scene.answer(ending, ends=True)
    assert len(scene.seen.tokens[early]) == 4
    assert len(scene.seen.tokens[late]) == 1
    scene.finish()
    assert scene.seen.tokens[early] == expected_output([1, 2, 3], early.seed, 40)
    assert scene.seen.tokens[late] == expected_output([9, 9], late.seed, 8)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_abort_ends_it_though_nobody_is_left_to_run(steps_in_flight: int) -> None:
    scene = Scene([[1, 2, 3]], steps_in_flight=steps_in_flight)
    (request,) = scene.requests
    handle = request.worker_handle
    scene.scheduler.abort(request)
    ending = scene.send()
    assert ending.finished_handles == [handle]
    assert ending.num_tokens == 0
    assert scene.replica.kv.pool.num_held > 0, "the worker may still write there"
    assert scene.answer(scene.plan, ends=True)
    assert scene.replica.kv.pool.num_held == 0
    assert scene.answer(ending, ends=True)
    assert scene.scheduler.schedule(scene.replica) is None


def test_nobody_runs_ahead_of_its_token_limit() -> None:
    scene = Scene([[1, 2, 3], [4, 5]], count=4)
    assert scene.plan.run_ahead == 3, "one of the four tokens is there"
    scene.finish()


def test_a_token_that_ends_a_request_makes_what_follows_it_void() -> None:
    wanted = expected_output([1, 2, 3], SEED, 10)
    scheduler, replica, worker, seen = make_scheduler(run_ahead=8), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    spec = make_spec([1, 2, 3], 10, stop_ids=frozenset(wanted[4:5]))
    (request,) = scheduler.add(spec, None, [1], SEED, CONTEXT)
    run_until_idle(scheduler, replica, worker, seen)
    assert seen.tokens[request] == expected_output([1, 2, 3], request.seed, 10)[: len(seen.tokens[request])]
    assert len(seen.finishes[request]) == 1
    assert replica.kv.pool.num_held == 0


def test_where_blocks_are_short_it_goes_as_far_as_those_in_hand() -> None:
    scene = Scene([[1] * 5, [2] * 5], num_blocks=5)
    assert scene.plan.run_ahead == 2 * BLOCK - 5, "all four blocks are taken, three of their slots are free"
    assert not scene.scheduler.totals.preemptions


@pytest.mark.parametrize("ran", [0, 1, 3])
def test_a_failure_keeps_the_iterations_before_it(ran: int) -> None:
    scene = Scene([[1, 2, 3], [4, 5]])
    for _ in range(ran):
        scene.answer(scene.plan)
    assert scene.answer(scene.plan, fail=True)
    table = scene.scheduler.table
    for request in scene.requests:
        assert len(scene.seen.tokens[request]) == 1 + ran
        assert table.computed[request.slot] == table.durable[request.slot] == request.num_tokens - 1
        assert table.pending[request.slot] == 0
    scene.finish()
    for request, prompt in zip(scene.requests, ([1, 2, 3], [4, 5]), strict=True):
        assert scene.seen.tokens[request] == expected_output(prompt, request.seed, 40)


def test_a_replica_that_is_lost_while_it_runs_ahead_loses_no_token() -> None:
    scene = Scene([[1, 2, 3], [4, 5]])
    for _ in range(2):
        scene.answer(scene.plan)
    scene.scheduler.detach(scene.replica)
    scene.in_flight.clear()
    scene.replica, scene.worker = make_replica(), ModelWorker()
    scene.scheduler.attach(scene.replica)
    scene.finish()
    for request, prompt in zip(scene.requests, ([1, 2, 3], [4, 5]), strict=True):
        assert scene.seen.tokens[request] == expected_output(prompt, request.seed, 40)
        assert scene.seen.finishes[request] == [Status.FINISHED_LENGTH]


def test_tokens_of_a_preempted_request_are_delivered_once_and_it_goes_on_behind_them() -> None:
    scene = Scene([[1, 2, 3]])
    scene.scheduler.reset_prefix_cache(preempt_running=True)
    ending = scene.send()
    assert ending.num_tokens == 0
    scene.answer(scene.plan)
    scene.answer(scene.plan, ends=True)
    scene.answer(ending, ends=True)
    (request,) = scene.requests
    assert len(scene.seen.tokens[request]) == 3
    scene.finish()
    assert scene.seen.tokens[request] == expected_output([1, 2, 3], request.seed, 40)


def test_a_worker_that_cannot_runs_one_iteration() -> None:
    for replica in (make_replica(run_ahead=1), make_replica(in_flight=1)):
        scheduler, worker, seen = make_scheduler(run_ahead=8), ModelWorker(), Collected()
        scheduler.attach(replica)
        scheduler.add(make_spec([1, 2], 6), None, [1], SEED, CONTEXT)
        assert all(plan.run_ahead == 1 for plan in run_until_idle(scheduler, replica, worker, seen))
