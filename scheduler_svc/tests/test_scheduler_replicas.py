"""Several replicas under one scheduler: who runs where, draining, pools of different sizes, and nobody left behind."""

import pytest
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec
from trivet_scheduler.core import Scheduler
from trivet_scheduler.core.admission import MOST_LEFT, PATIENCE_S
from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.plan import StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

CONTEXT = 10_000


class Fleet:
    """Replicas with their workers; a turn schedules each as far as it goes and answers its oldest step."""

    def __init__(self, scheduler: Scheduler, *replicas: Replica) -> None:
        self.scheduler, self.seen = scheduler, Collected()
        self.workers: dict[Replica, ModelWorker] = {}
        self.steps: dict[Replica, list[StepPlan]] = {}
        for replica in replicas:
            self.join(replica)

    def join(self, replica: Replica) -> None:
        self.workers[replica], self.steps[replica] = ModelWorker(), []
        self.scheduler.attach(replica)

    def leave(self, replica: Replica) -> None:
        self.scheduler.detach(replica)
        del self.workers[replica], self.steps[replica]

    def schedule(self, replica: Replica) -> list[StepPlan]:
        plans = []
        while (plan := self.scheduler.schedule(replica)) is not None:
            plans.append(plan)
        self.steps[replica] += plans
        return plans

    def answer(self, replica: Replica) -> None:
        if self.steps[replica]:
            self.scheduler.update(replica, self.workers[replica].run(self.steps[replica].pop(0)))
        self.seen.take(self.scheduler)

    def run(self, most: int = 2000) -> None:
        """Turns until nothing is left to do. A turn without a step may still move a request to a replica that comes before."""
        idle = 0
        for _ in range(most):
            for replica in self.workers:
                self.schedule(replica)
            idle = 0 if any(self.steps.values()) else idle + 1
            if idle == 2:
                break
            for replica in self.workers:
                self.answer(replica)
        else:
            raise AssertionError("it never came to rest")
        self.seen.take(self.scheduler)

    def started(self, request: Request) -> Replica | None:
        return self.scheduler.replica_of(request)


def add(scheduler: Scheduler, prompt: list[int], count: int = 8, handle: int = 1) -> Request:
    return scheduler.add(make_spec(prompt, count), None, [handle], handle, CONTEXT)[0]


def test_load_is_spread_and_every_request_runs_on_one_replica() -> None:
    scheduler = make_scheduler()
    fleet = Fleet(scheduler, *(make_replica(name=name) for name in "abc"))
    requests = [add(scheduler, [index] * 9, handle=index) for index in range(9)]
    for replica in scheduler.replicas:
        fleet.schedule(replica)
    assert [len(replica.running) for replica in scheduler.replicas] == [3, 3, 3]
    fleet.run()
    for index, request in enumerate(requests):
        assert fleet.seen.tokens[request] == expected_output([index] * 9, request.seed, 8)


def test_a_cached_prefix_draws_a_request_to_its_owner_until_that_has_too_much_to_do() -> None:
    scheduler = make_scheduler()
    first, second = make_replica(name="a", tokens=64), make_replica(name="b", tokens=64)
    fleet = Fleet(scheduler, first, second)
    prompt = list(range(8 * BLOCK))
    add(scheduler, prompt, 1)
    fleet.schedule(first)
    fleet.run()
    fleet.schedule(second)
    warm = add(scheduler, prompt, 30, handle=2)
    assert not fleet.schedule(second), "it is left to the replica that has its prefix"
    fleet.schedule(first)
    assert fleet.started(warm) is first
    busy = add(scheduler, [500 + index for index in range(20 * BLOCK)], 30, handle=3)
    fleet.schedule(first)
    fleet.schedule(second)
    assert fleet.started(busy) is second
    fleet.run()
    load = [add(scheduler, [900 + index] * 8, 60, handle=10 + index) for index in range(6)]
    for request in load:  # put where the prefix is, as if the other had been away
        scheduler.drain(second)
        fleet.schedule(first)
        assert fleet.started(request) is first
    second.draining = False
    fresh = add(scheduler, prompt[:BLOCK] + [7] * BLOCK, 5, handle=20)
    fleet.schedule(second)
    assert fleet.started(fresh) is second
    fleet.run()


def test_a_draining_replica_admits_nobody_and_finishes_what_it_has() -> None:
    scheduler = make_scheduler()
    leaving, staying = make_replica(name="a"), make_replica(name="b")
    fleet = Fleet(scheduler, leaving)
    begun = add(scheduler, [1] * 6, handle=1)
    fleet.schedule(leaving)
    scheduler.drain(leaving)
    assert not scheduler.is_drained(leaving)
    late = add(scheduler, [2] * 6, handle=2)
    fleet.run()
    assert fleet.seen.finishes == {begun: [Status.FINISHED_LENGTH]}
    assert scheduler.is_drained(leaving)
    assert late in scheduler.waiting
    fleet.join(staying)
    fleet.leave(leaving)
    fleet.run()
    assert fleet.seen.tokens[late] == expected_output([2] * 6, late.seed, 8)


def test_what_a_draining_replica_does_not_finish_goes_on_elsewhere() -> None:
    scheduler = make_scheduler()
    leaving, staying = make_replica(name="a"), make_replica(name="b")
    fleet = Fleet(scheduler, leaving)
    requests = [add(scheduler, [index] * 6, 12, handle=index) for index in range(4)]
    for _ in range(4):
        fleet.schedule(leaving)
        fleet.answer(leaving)
    scheduler.drain(leaving)
    fleet.join(staying)
    fleet.schedule(leaving)
    fleet.leave(leaving)
    assert [scheduler.replica_of(request) for request in requests] == [None] * 4
    fleet.run()
    for index, request in enumerate(requests):
        assert fleet.seen.tokens[request] == expected_output([index] * 6, request.seed, 12)


def test_a_prompt_too_large_for_one_replica_waits_for_the_larger() -> None:
    scheduler = make_scheduler()
    small, large = make_replica(6, name="small"), make_replica(40, name="large", tokens=64)
    fleet = Fleet(scheduler, small, large)
    filler = add(scheduler, [1] * 140, 10, handle=1)
    fleet.schedule(small)
    fleet.schedule(large)
    assert fleet.started(filler) is large
    long, short = add(scheduler, [2] * 40, 4, handle=2), add(scheduler, [3] * 8, 4, handle=3)
    fleet.schedule(small)
    assert fleet.started(short) is small
    assert fleet.started(long) is None
    fleet.run()
    assert fleet.seen.tokens[long] == expected_output([2] * 40, long.seed, 4)


def test_who_outgrows_a_small_replica_goes_on_with_a_larger_one() -> None:
    scheduler = make_scheduler()
    small = make_replica(6, name="small")
    fleet = Fleet(scheduler, small)
    fleet.join(make_replica(40, name="large"))
    grower = add(scheduler, [1] * 12, 60, handle=1)
    fleet.schedule(small)
    assert fleet.started(grower) is small
    fleet.run()
    assert fleet.seen.tokens[grower] == expected_output([1] * 12, grower.seed, 60)
    assert fleet.seen.finishes[grower] == [Status.FINISHED_LENGTH]


def test_who_outgrew_a_small_replica_ends_with_length_when_the_larger_is_gone() -> None:
    scheduler = make_scheduler()
    small, large = make_replica(6, name="small"), make_replica(40, name="large")
    fleet = Fleet(scheduler, small, large)
    grower = add(scheduler, [1] * 12, 60, handle=1)
    fleet.schedule(small)
    while len(grower.output) < 9:
        fleet.schedule(small)
        fleet.answer(small)
    fleet.leave(large)
    fleet.run()
    assert fleet.seen.finishes[grower] == [Status.FINISHED_LENGTH]
    assert fleet.seen.tokens[grower] == expected_output([1] * 12, grower.seed, 5 * BLOCK + 1 - 12)


def test_a_request_is_left_to_a_better_replica_for_a_while_and_no_longer() -> None:
    scheduler = make_scheduler()
    owner, other = make_replica(name="a", tokens=64), make_replica(name="b", tokens=64)
    fleet = Fleet(scheduler, owner, other)
    prompt = list(range(8 * BLOCK))
    add(scheduler, prompt, 1)
    fleet.schedule(owner)
    fleet.run()
    request = add(scheduler, prompt, 3, handle=2)
    assert not fleet.schedule(other)
    scheduler._clock.advance(PATIENCE_S / 2)
    assert not fleet.schedule(other)
    scheduler._clock.advance(PATIENCE_S)
    assert fleet.schedule(other)
    assert fleet.started(request) is other
    fleet.run()


def test_who_is_left_to_another_replica_keeps_the_place_in_the_queue() -> None:
    scheduler = make_scheduler()
    owner, other = make_replica(name="a", tokens=64, seqs=1), make_replica(name="b", tokens=64, seqs=1)
    fleet = Fleet(scheduler, owner, other)
    prompt = list(range(8 * BLOCK))
    add(scheduler, prompt, 1)
    fleet.schedule(owner)
    fleet.run()
    first = add(scheduler, prompt, 3, handle=2)
    second, third = (add(scheduler, [700 + handle] * 8, 3, handle=handle) for handle in (3, 4))
    fleet.schedule(other)
    assert fleet.started(second) is other
    assert [scheduler.waiting.peek(), fleet.started(third)] == [first, None]
    fleet.schedule(owner)
    assert fleet.started(first) is owner
    fleet.run()


def test_blocks_of_different_sizes_are_never_taken_for_each_other() -> None:
    scheduler = make_scheduler()
    fine, coarse = make_replica(name="fine", tokens=64), make_replica(name="coarse", tokens=64, block_size=2 * BLOCK)
    fleet = Fleet(scheduler, fine)
    shared = [1] * BLOCK
    moved = add(scheduler, shared + [2] * 3 * BLOCK, 20, handle=1)
    fleet.schedule(fine)
    fleet.answer(fine)
    fleet.leave(fine)
    fleet.join(coarse)
    fleet.workers[coarse].block_size = 2 * BLOCK
    fleet.run()
    other = add(scheduler, shared + [3] * 3 * BLOCK, 5, handle=2)
    fleet.run()
    assert fleet.seen.cached[other] == 0
    assert fleet.seen.tokens[other] == expected_output(shared + [3] * 3 * BLOCK, other.seed, 5)
    assert fleet.seen.tokens[moved] == expected_output(shared + [2] * 3 * BLOCK, moved.seed, 20)


def test_a_step_looks_at_a_bounded_part_of_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    owner, other = (make_replica(3000, name=name, tokens=64, seqs=500) for name in "ab")
    fleet = Fleet(scheduler, owner, other)
    prompt = list(range(20 * BLOCK))
    add(scheduler, prompt, 1)
    fleet.schedule(owner)
    fleet.run()
    for index in range(400):
        add(scheduler, [*prompt, index], 1, handle=index + 2)
    looked = []
    lookup = Prefixes.lookup
    monkeypatch.setattr(Prefixes, "lookup", lambda self, *arguments: looked.append(arguments) or lookup(self, *arguments))
    scheduler.schedule(other)
    assert 0 < len(looked) <= 2 * (MOST_LEFT + other.token_budget)
    assert len(scheduler.waiting) > 300
    fleet.run()
    assert not scheduler.requests
