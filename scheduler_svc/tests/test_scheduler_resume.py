"""Requests that another scheduler had begun: their output counts here, and nothing of it is said again."""

import pytest
from model_worker import Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, run_until_idle
from trivet_proto.errors import TrivetError
from trivet_scheduler.request import Resume, Status

CONTEXT = 10_000
PROMPT = [3, 1, 4, 1, 5]
SEED = 7
WHOLE = expected_output(PROMPT, SEED, 20)


def resumed(resume: Resume, max_tokens: int = 20, *, stop_ids: frozenset[int] = frozenset(), min_tokens: int = 0, **sampling: object):
    """One request to its end: the request and what its owner saw."""
    scheduler, replica, seen = make_scheduler(), make_replica(tokens=8), Collected()
    scheduler.attach(replica)
    spec = make_spec(PROMPT, max_tokens, stop_ids=stop_ids, min_tokens=min_tokens, **sampling)
    (request,) = scheduler.add(spec, None, [1], SEED, CONTEXT, [resume])
    run_until_idle(scheduler, replica, ModelWorker(), seen)
    assert replica.kv.pool.num_held == 0
    assert not scheduler.requests
    assert not len(scheduler.waiting)
    return request, seen


@pytest.mark.parametrize("delivered", [0, 1, 4, 19])
def test_it_goes_on_with_the_next_token(delivered: int) -> None:
    request, seen = resumed(Resume(WHOLE[:delivered]))
    assert seen.tokens[request] == WHOLE[delivered:]
    assert request.output == WHOLE
    assert seen.finishes[request] == [Status.FINISHED_LENGTH]


def test_a_limit_that_was_reached_ends_it_at_once() -> None:
    request, seen = resumed(Resume(WHOLE))
    assert seen.tokens[request] == []
    assert seen.finishes[request] == [Status.FINISHED_LENGTH]


def test_a_stop_token_that_was_delivered_ends_it_at_once() -> None:
    request, seen = resumed(Resume(WHOLE[:4]), stop_ids=frozenset({WHOLE[3]}))
    assert seen.tokens[request] == []
    assert seen.finishes[request] == [Status.FINISHED_STOPPED]
    assert request.stop_token == WHOLE[3]


def test_a_stop_token_at_the_limit_counts_as_a_stop() -> None:
    request, seen = resumed(Resume(WHOLE[:4]), 4, stop_ids=frozenset({WHOLE[3]}))
    assert seen.finishes[request] == [Status.FINISHED_STOPPED]


def test_min_tokens_count_from_the_first_token_ever() -> None:
    stops = frozenset({WHOLE[1], WHOLE[6]})
    request, seen = resumed(Resume(WHOLE[:4]), stop_ids=stops, min_tokens=5)
    assert seen.tokens[request] == WHOLE[4:7]
    assert seen.finishes[request] == [Status.FINISHED_STOPPED]


def test_what_is_done_ends_at_once() -> None:
    request, seen = resumed(Resume(WHOLE[:4], done=True))
    assert seen.tokens[request] == []
    assert seen.finishes[request] == [Status.FINISHED_STOPPED]


@pytest.mark.parametrize("reported", [True, False])
def test_what_was_reported_is_not_reported_again(reported: bool) -> None:
    resume = Resume(WHOLE[:4], prompt_logprobs_reported=reported, cached_tokens_reported=reported, timing_reported=reported)
    request, seen = resumed(resume, prompt_logprobs=0)
    assert (request in seen.cached) is not reported
    assert (request in seen.timed) is not reported
    assert seen.prompts.get(request) == (None if reported else len(PROMPT))
    assert seen.tokens[request] == WHOLE[4:]


def test_children_resume_each_with_their_own() -> None:
    scheduler, replica, seen = make_scheduler(), make_replica(), Collected()
    scheduler.attach(replica)
    fresh = scheduler.add(make_spec(PROMPT, 20, children=3), None, [1, 2, 3], SEED, CONTEXT)
    outputs = [expected_output(PROMPT, child.seed, 20) for child in fresh]
    for child in fresh:
        scheduler.abort(child)
    resume = [Resume(outputs[0], done=True), Resume(outputs[1][:7]), Resume()]
    children = scheduler.add(make_spec(PROMPT, 20, children=3), None, [4, 5, 6], SEED, CONTEXT, resume)
    run_until_idle(scheduler, replica, ModelWorker(), seen)
    assert [seen.tokens[child] for child in children] == [[], outputs[1][7:], outputs[2]]


def test_output_that_no_cache_here_can_hold_ends_with_length() -> None:
    scheduler, replica, seen = make_scheduler(), make_replica(num_blocks=4), Collected()
    scheduler.attach(replica)
    (request,) = scheduler.add(make_spec(PROMPT, 20), None, [1], SEED, CONTEXT, [Resume(WHOLE[:9])])
    run_until_idle(scheduler, replica, ModelWorker(), seen)
    assert seen.tokens.get(request, []) == []
    assert seen.finishes[request] == [Status.FINISHED_LENGTH]


def test_what_each_child_had_is_said_for_all_or_for_none() -> None:
    scheduler = make_scheduler()
    with pytest.raises(TrivetError, match=r"has 2 children, but what 1 had"):
        scheduler.add(make_spec(PROMPT, children=2), None, [1, 2], SEED, CONTEXT, [Resume()])
    assert not scheduler.requests
