"""The core against a worker without a model: whatever the schedule, the output is the same, and nothing is left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_worker import (
    BLOCK,
    Collected,
    ModelWorker,
    expected_output,
    make_replica,
    make_scheduler,
    make_spec,
    outcome,
    run_until_idle,
)
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.sampling import child_seed
from trivet_scheduler.plan import StepStatus
from trivet_scheduler.request import Status

CONTEXT = 10_000

in_flight = pytest.mark.parametrize("steps_in_flight", [1, 2])


@in_flight
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8),
    outputs=st.lists(st.integers(1, 20), min_size=8, max_size=8),
    num_blocks=st.integers(14, 60),
    budget=st.integers(1, 40),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 3]),
    run_ahead=st.sampled_from([1, 2, 8]),
)
@settings(deadline=None, max_examples=80)
def test_every_schedule_gives_the_same_output(steps_in_flight, prompts, outputs, num_blocks, budget, caching, threshold, run_ahead) -> None:
    scheduler = make_scheduler(
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
        run_ahead=run_ahead,
    )
    replica, worker, seen = make_replica(num_blocks, tokens=budget), ModelWorker(), Collected()
    scheduler.attach(replica)
    requests = [
        scheduler.add(make_spec(prompt, count), None, [index], index, CONTEXT)[0]
        for index, (prompt, count) in enumerate(zip(prompts, outputs, strict=False))
    ]
    plans = run_until_idle(scheduler, replica, worker, seen)
    for request, prompt, count in zip(requests, prompts, outputs, strict=False):
        assert seen.tokens[request] == expected_output(prompt, request.seed, count)
        assert seen.finishes[request] == [Status.FINISHED_LENGTH]
        assert 0 <= seen.cached[request] < len(prompt)
    assert all(plan.num_tokens <= budget for plan in plans)
    assert replica.kv.pool.num_held == 0
    replica.kv.pool.check()
    assert not scheduler.requests
    assert not len(scheduler.waiting)


@in_flight
def test_preemption_neither_loses_nor_repeats_a_token(steps_in_flight: int) -> None:
    scheduler = make_scheduler(steps_in_flight=steps_in_flight)
    replica, worker, seen = make_replica(1 + 3 * 25 // BLOCK, tokens=64), ModelWorker(), Collected()
    scheduler.attach(replica)
    prompts = [[index] * 10 for index in range(8)]
    requests = [scheduler.add(make_spec(prompt, 15), None, [index], index, CONTEXT)[0] for index, prompt in enumerate(prompts)]
    run_until_idle(scheduler, replica, worker, seen)
    assert scheduler.totals.preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert seen.tokens[request] == expected_output(prompt, request.seed, 15)
    assert replica.kv.pool.num_held == 0


def test_a_prompt_that_was_computed_is_found_but_for_its_last_token() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    prompt = list(range(4 * BLOCK))
    for expected in (0, 3 * BLOCK, 3 * BLOCK):
        (request,) = scheduler.add(make_spec(prompt, 2), None, [1], 0, CONTEXT)
        run_until_idle(scheduler, replica, worker, seen)
        assert seen.cached[request] == expected
        assert seen.tokens[request] == expected_output(prompt, request.seed, 2)


def test_children_share_their_prompt_and_have_seeds_of_their_own() -> None:
    for caching in (True, False):
        scheduler, worker, seen = make_scheduler(enable_prefix_caching=caching), ModelWorker(), Collected()
        replica = make_replica()
        scheduler.attach(replica)
        prompt = list(range(3 * BLOCK + 1))
        children = scheduler.add(make_spec(prompt, 5, children=3), None, [1, 2, 3], 7, CONTEXT)
        plans = run_until_idle(scheduler, replica, worker, seen)
        assert sum(plan.num_tokens for plan in plans) == len(prompt) + 2 * 1 + 3 * 4
        for index, child in enumerate(children):
            assert seen.tokens[child] == expected_output(prompt, child_seed(7, index), 5)


def test_decodes_get_their_token_in_every_step_while_prompts_are_computed() -> None:
    scheduler, replica, worker = make_scheduler(steps_in_flight=1), make_replica(500, tokens=8), ModelWorker()
    scheduler.attach(replica)
    (stream,) = scheduler.add(make_spec([1], 60), None, [1], 0, CONTEXT)
    scheduler.update(replica, worker.run(scheduler.schedule(replica)))
    for index in range(5):
        scheduler.add(make_spec([index] * 60, 1), None, [index + 2], 0, CONTEXT)
    while len(scheduler.requests) > 1:
        before = len(stream.output)
        plan = scheduler.schedule(replica)
        assert plan.num_tokens <= 8
        scheduler.update(replica, worker.run(plan))
        assert len(stream.output) == before + 1


def test_a_lost_replica_gives_its_requests_to_the_next() -> None:
    scheduler, seen = make_scheduler(), Collected()
    replica, worker = make_replica(), ModelWorker()
    scheduler.attach(replica)
    prompts = [[index] * 6 for index in range(4)]
    requests = [scheduler.add(make_spec(prompt, 10), None, [index], index, CONTEXT)[0] for index, prompt in enumerate(prompts)]
    for _ in range(5):
        scheduler.update(replica, worker.run(scheduler.schedule(replica)))
        seen.take(scheduler)
    scheduler.schedule(replica)  # one in flight when it dies
    scheduler.detach(replica)
    heir, worker = make_replica(), ModelWorker()
    scheduler.attach(heir)
    run_until_idle(scheduler, heir, worker, seen)
    for request, prompt in zip(requests, prompts, strict=True):
        assert seen.tokens[request] == expected_output(prompt, request.seed, 10)


def test_what_can_never_run_is_refused_with_both_sizes() -> None:
    scheduler, replica = make_scheduler(), make_replica(num_blocks=10)
    scheduler.attach(replica)
    with pytest.raises(TrivetError, match=r"prompt of 40 tokens needs 10 KV blocks; the cache holds 36") as refused:
        scheduler.add(make_spec([1] * 40), None, [1], 0, CONTEXT)
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    with pytest.raises(TrivetError, match=r"has 10 tokens and max_tokens is 8, together more than the context of 16"):
        scheduler.add(make_spec([1] * 10, 8), None, [1], 0, 16)
    assert not scheduler.requests


def test_a_request_that_outgrows_the_pool_ends_with_length() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(num_blocks=10), ModelWorker(), Collected()
    scheduler.attach(replica)
    (request,) = scheduler.add(make_spec([1] * 30, 400), None, [1], 0, CONTEXT)
    run_until_idle(scheduler, replica, worker, seen)
    assert seen.finishes[request] == [Status.FINISHED_LENGTH]
    assert len(seen.tokens[request]) == 9 * BLOCK + 1 - 30


def test_waiting_is_bounded_and_says_when_to_come_back() -> None:
    scheduler = make_scheduler(max_waiting_requests=3)
    scheduler.add(make_spec([1], children=3), None, [1, 2, 3], 0, CONTEXT)
    with pytest.raises(TrivetError) as refused:
        scheduler.add(make_spec([1]), None, [4], 0, CONTEXT)
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert refused.value.retry_after_ms


def test_aborts_and_stops_free_blocks_once_the_steps_in_flight_are_answered() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    aborted, stopped = (scheduler.add(make_spec([index] * 9, 50), None, [index], 0, CONTEXT)[0] for index in range(2))
    first, second = scheduler.schedule(replica), scheduler.schedule(replica)
    scheduler.abort(aborted)
    scheduler.stop(stopped)
    assert replica.kv.pool.num_held > 0
    scheduler.update(replica, worker.run(first))
    assert replica.kv.pool.num_held > 0
    scheduler.update(replica, worker.run(second))
    assert replica.kv.pool.num_held == 0
    seen.take(scheduler)
    assert seen.finishes == {aborted: [Status.FINISHED_ABORTED], stopped: [Status.FINISHED_STOPPED]}
    assert seen.tokens == {aborted: [], stopped: []}


def test_a_limit_of_no_tokens_ends_at_once_or_after_the_prompt_logprobs() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    (plain,) = scheduler.add(make_spec([1, 2, 3], 0), None, [1], 0, CONTEXT)
    assert run_until_idle(scheduler, replica, worker, seen) == []
    (scored,) = scheduler.add(make_spec([1, 2, 3], 0, prompt_logprobs=1), None, [2], 0, CONTEXT)
    plans = run_until_idle(scheduler, replica, worker, seen)
    assert [plan.num_tokens for plan in plans] == [3]
    assert seen.finishes == {plain: [Status.FINISHED_LENGTH], scored: [Status.FINISHED_LENGTH]}
    assert seen.tokens == {plain: [], scored: []}


def test_an_answer_to_no_step_is_refused_and_changes_nothing() -> None:

    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    (request,) = scheduler.add(make_spec([1], 3), None, [1], 0, CONTEXT)
    plan = scheduler.schedule(replica)
    for wrong in (outcome(9, StepStatus.DONE, [1], [1], [5]), outcome(plan.number, StepStatus.DONE, [77], [1], [5])):
        with pytest.raises(TrivetError):
            scheduler.update(replica, wrong)
    scheduler.update(replica, worker.run(plan))
    run_until_idle(scheduler, replica, worker, seen)
    assert seen.tokens[request] == expected_output([1], 0, 3)


def test_a_request_whose_time_runs_out_ends_with_that_error() -> None:
    scheduler, replica, seen = make_scheduler(), make_replica(), Collected()
    scheduler.attach(replica)
    (request,) = scheduler.add(make_spec([1], 3, deadline=1005.0), None, [1], 0, CONTEXT)
    scheduler.expire()
    assert not seen.finishes
    scheduler._clock.advance(6)
    scheduler.expire()
    seen.take(scheduler)
    assert seen.finishes[request] == [Status.FINISHED_ERROR]
    assert request.error.kind is ErrorKind.DEADLINE_EXCEEDED
