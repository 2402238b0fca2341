"""A step that fails, alone or with the next one in flight: nothing is lost or repeated, and nothing that was not written can be found."""

from collections.abc import Iterator

import pytest
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, run_until_idle
from trivet_proto.errors import ErrorKind
from trivet_scheduler.core import Scheduler
from trivet_scheduler.core import scheduler as step_of_the_core
from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.departure import depart
from trivet_scheduler.core.growth import KnownRows
from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.plan import StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

CONTEXT = 10_000
PROMPT = [2, 7, 1, 8] * 3 + [2]


def run_with_failures(scheduler: Scheduler, replica: Replica, worker: ModelWorker, seen: Collected, failing: set[int]) -> None:
    """To the end, with as many steps in flight as allowed; those of `failing` fail, those behind them are skipped."""
    waiting: list[StepPlan] = []
    broken: int | None = None
    for _ in range(500):
        while (plan := scheduler.schedule(replica)) is not None:
            waiting.append(plan)
        if not waiting:
            return
        plan = waiting.pop(0)
        if broken is not None and plan.resync != broken:
            scheduler.update(replica, worker.skip(plan))
        elif plan.number in failing:
            broken = plan.number
            scheduler.update(replica, worker.run(plan, fail=True))
        else:
            broken = None
            scheduler.update(replica, worker.run(plan))
        seen.take(scheduler)
    raise AssertionError("it never came to rest")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}, {1, 3}, {3, 5, 6}, {2, 4, 6}])
def test_no_token_is_lost_or_repeated(steps_in_flight: int, failing: set[int]) -> None:
    scheduler = make_scheduler(steps_in_flight=steps_in_flight)
    replica, worker, seen = make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    prompts = [PROMPT, PROMPT, [5, 6, 7]]
    requests = [scheduler.add(make_spec(prompt, 9), None, [index], index, CONTEXT)[0] for index, prompt in enumerate(prompts)]
    run_with_failures(scheduler, replica, worker, seen, failing)
    assert scheduler.totals.failed_steps
    for request, prompt in zip(requests, prompts, strict=True):
        assert seen.tokens[request] == expected_output(prompt, request.seed, 9)
        assert seen.finishes[request] == [Status.FINISHED_LENGTH]
    assert replica.kv.pool.num_held == 0


def test_the_retry_is_smaller_and_grows_again() -> None:
    scheduler, worker = make_scheduler(steps_in_flight=1), ModelWorker()
    replica = make_replica(tokens=32)
    scheduler.attach(replica)
    scheduler.add(make_spec([1] * 60, 1), None, [1], 0, CONTEXT)
    plan = scheduler.schedule(replica)
    assert plan.num_tokens == 32
    scheduler.update(replica, worker.run(plan, fail=True))
    sizes = []
    while (plan := scheduler.schedule(replica)) is not None:
        sizes.append(plan.num_tokens)
        scheduler.update(replica, worker.run(plan))
    assert sizes == [16, 32, 12]


def test_a_request_whose_steps_always_fail_ends_with_their_error() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    (request,) = scheduler.add(make_spec(PROMPT, 9), None, [1], 0, CONTEXT)
    run_with_failures(scheduler, replica, worker, seen, set(range(100)))
    assert seen.finishes[request] == [Status.FINISHED_ERROR]
    assert request.error.kind is ErrorKind.INTERNAL
    assert replica.kv.pool.num_held == 0


# Prefix hashes of blocks that no step has written. With naming at departure, as if a step that is sent were done, both of these serve
# text that belongs to no prompt: the guard that they test is that `Answers` alone names blocks.


@pytest.fixture
def naming_at_departure(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    prefixes = Prefixes(shared_between_requests=True)

    def too_early(book: RequestBook, replica: Replica, known: KnownRows, new: list[tuple[Request, int]], iterations: int) -> StepPlan:
        plan = depart(book, replica, known, new, iterations)
        for request in replica.flights[-1].requests:
            prefixes.name_full_blocks(replica, request, int(book.table.computed[request.slot]) // replica.kv.block_size)
        return plan

    with monkeypatch.context() as patched:
        patched.setattr(step_of_the_core, "depart", too_early)
        yield


def tokens_after_a_failure_and_an_abort() -> tuple[list[int], list[int]]:
    """The failed step's only request goes away; another asks the same. What it gets, and what it should."""
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(strict=False), Collected()
    scheduler.attach(replica)
    (gone,) = scheduler.add(make_spec(PROMPT, 9), None, [1], 0, CONTEXT)
    scheduler.update(replica, worker.run(scheduler.schedule(replica), fail=True))
    scheduler.abort(gone)
    (request,) = scheduler.add(make_spec(PROMPT, 9), None, [2], 0, CONTEXT)
    resync = scheduler.schedule(replica)
    scheduler.update(replica, worker.run(resync))
    run_until_idle(scheduler, replica, worker, seen)
    return seen.tokens[request], expected_output(PROMPT, request.seed, 9)


def tokens_of_the_next_in_flight() -> tuple[list[int], list[int]]:
    """A step fails while the next, with a request of the same prompt, is in flight; its retry writes less than it did."""
    scheduler, replica, worker, seen = make_scheduler(), make_replica(tokens=2 * BLOCK), ModelWorker(strict=False), Collected()
    scheduler.attach(replica)
    scheduler.add(make_spec(PROMPT[: 2 * BLOCK], 9), None, [1], 0, CONTEXT)
    first = scheduler.schedule(replica)
    (request,) = scheduler.add(make_spec([*PROMPT[: 2 * BLOCK], 3], 9), None, [2], 0, CONTEXT)
    second = scheduler.schedule(replica)
    assert first.num_tokens == 2 * BLOCK
    assert second is not None
    scheduler.update(replica, worker.run(first, fail=True))
    scheduler.update(replica, worker.skip(second))
    run_until_idle(scheduler, replica, worker, seen)
    return seen.tokens[request], expected_output([*PROMPT[: 2 * BLOCK], 3], request.seed, 9)


def test_no_hash_of_an_unwritten_block_survives_a_failed_step() -> None:
    got, right = tokens_after_a_failure_and_an_abort()
    assert got == right
    got, right = tokens_of_the_next_in_flight()
    assert got == right


@pytest.mark.usefixtures("naming_at_departure")
def test_hashes_given_before_the_answer_would_serve_wrong_text() -> None:
    got, right = tokens_after_a_failure_and_an_abort()
    assert got != right
    got, right = tokens_of_the_next_in_flight()
    assert got != right
