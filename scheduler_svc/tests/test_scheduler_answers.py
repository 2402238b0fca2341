"""Answers that do not fit their step are refused with nothing changed; logits that are not finite end one request and poison nobody."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, run_until_idle
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_scheduler.plan import LogprobArrays, StepOutcome, StepStatus
from trivet_scheduler.request import Status

CONTEXT = 10_000
PREFIX = list(range(100, 100 + 3 * BLOCK))


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def logprobs(counts: np.ndarray, ids: np.ndarray, values: int, ranks: np.ndarray) -> LogprobArrays:
    return LogprobArrays(counts, ids, np.zeros(values, dtype=np.float32), ranks)


# Of a step with two rows, both of which give a token and its logprob.
MALFORMED: dict[str, Callable[[StepOutcome], dict[str, object]]] = {
    "another step": lambda good: {"number": good.number + 1},
    "an earlier step": lambda good: {"number": good.number - 1},
    "other requests": lambda good: {"handles": [handle + 1 for handle in good.handles]},
    "a request too few": lambda good: {"handles": good.handles[:1]},
    "a token too few": lambda good: {"token_counts": [1, 0], "token_ids": [5]},
    "a token too many": lambda good: {"token_counts": [1, 2], "token_ids": [5, 6, 7]},
    "a negative count": lambda good: {"token_counts": [-1, 3]},
    "counts without tokens": lambda good: {"token_ids": [5]},
    "flags of too few rows": lambda good: {"flags": bytes(1)},
    "skipped without a failure": lambda good: {"status": StepStatus.SKIPPED},
    "rows without logprobs": lambda good: {"logprobs": None},
    "logprobs without rows": lambda good: {"logprob_rows": []},
    "logprobs of a row that is not there": lambda good: {"logprob_rows": [0, 2]},
    "logprobs of a row twice": lambda good: {"logprob_rows": [1, 1]},
    "logprobs of too few tokens": lambda good: {"logprobs": logprobs(ints(1), ints(5), 1, ints(0))},
    "fewer entries than counted": lambda good: {"logprobs": logprobs(ints(1, 2), ints(5, 6), 2, ints(0, 0))},
    "fewer values than ids": lambda good: {"logprobs": logprobs(ints(1, 1), ints(5, 6), 1, ints(0, 0))},
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_an_answer_that_does_not_fit_its_step_is_refused_and_changes_nothing(fault: str) -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    prompts = [[1, 2, 3], [4, 5, 6]]
    requests = [scheduler.add(make_spec(prompt, 9, logprobs=0), None, [index], index, CONTEXT)[0] for index, prompt in enumerate(prompts)]
    good = worker.run(scheduler.schedule(replica))
    with pytest.raises(TrivetError, match="the answer to step") as refused:
        scheduler.update(replica, dataclasses.replace(good, **MALFORMED[fault](good)))
    assert refused.value.kind is ErrorKind.ABORTED
    assert not scheduler.take_deltas()
    scheduler.update(replica, good)
    run_until_idle(scheduler, replica, worker, seen)
    for request, prompt in zip(requests, prompts, strict=True):
        assert seen.tokens[request] == expected_output(prompt, request.seed, 9)
        assert seen.logprobs[request] == seen.tokens[request]


def test_a_step_done_behind_a_failed_one_is_refused() -> None:
    scheduler, replica, worker = make_scheduler(), make_replica(), ModelWorker()
    scheduler.attach(replica)
    scheduler.add(make_spec([1, 2, 3], 9), None, [1], 0, CONTEXT)
    first, second = scheduler.schedule(replica), scheduler.schedule(replica)
    good, done = worker.run(first), worker.run(second)
    scheduler.update(replica, dataclasses.replace(good, status=StepStatus.FAILED))
    with pytest.raises(TrivetError, match="its status is DONE though a step before it failed"):
        scheduler.update(replica, done)


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(), ModelWorker(), Collected()
    scheduler.attach(replica)
    ill, well = (scheduler.add(make_spec([index] * 5, 9), None, [index], index, CONTEXT)[0] for index in (1, 2))
    plan = scheduler.schedule(replica)
    scheduler.update(replica, worker.run(plan, broken=frozenset({ill.worker_handle})))
    run_until_idle(scheduler, replica, worker, seen)
    assert seen.finishes == {ill: [Status.FINISHED_ERROR], well: [Status.FINISHED_LENGTH]}
    assert ill.error.kind is ErrorKind.NON_FINITE
    assert seen.tokens[well] == expected_output([2] * 5, well.seed, 9)


def test_blocks_shared_with_a_request_that_is_not_finite_are_zeroed_only_when_nobody_reads_them() -> None:
    scheduler, worker, seen = make_scheduler(steps_in_flight=1), ModelWorker(), Collected()
    replica = make_replica(tokens=64)
    scheduler.attach(replica)
    ill = scheduler.add(make_spec([*PREFIX, 1], 20), None, [1], 1, CONTEXT)[0]
    scheduler.update(replica, worker.run(scheduler.schedule(replica)))
    well = scheduler.add(make_spec([*PREFIX, 2], 20), None, [2], 2, CONTEXT)[0]
    scheduler.update(replica, worker.run(scheduler.schedule(replica)))
    shared = set(ill.block_table) & set(well.block_table)
    assert len(shared) == 3
    plan = scheduler.schedule(replica)
    scheduler.update(replica, worker.run(plan, broken=frozenset({ill.worker_handle})))
    zeroed: list[int] = []
    while (plan := scheduler.schedule(replica)) is not None:
        zeroed += plan.blocks_to_zero
        assert not shared & set(zeroed), "they are being read"
        scheduler.update(replica, worker.run(plan))
    seen.take(scheduler)
    assert zeroed
    assert seen.tokens[well] == expected_output([*PREFIX, 2], well.seed, 20)
    after = scheduler.add(make_spec([*PREFIX, 3], 1), None, [3], 3, CONTEXT)[0]
    plan = scheduler.schedule(replica)
    assert shared <= set(plan.blocks_to_zero)
    scheduler.update(replica, worker.run(plan))
    seen.take(scheduler)
    assert seen.cached[after] == 0, "nobody finds them any more"


def test_blocks_of_a_request_that_ended_before_its_logits_were_known_to_be_bad_are_zeroed_too() -> None:
    scheduler, replica, worker, seen = make_scheduler(), make_replica(num_blocks=3), ModelWorker(), Collected()
    scheduler.attach(replica)
    gone = scheduler.add(make_spec([1] * 5, 3), None, [1], 1, CONTEXT)[0]
    plan = scheduler.schedule(replica)
    handle = gone.worker_handle
    scheduler.abort(gone)
    scheduler.update(replica, worker.run(plan, broken=frozenset({handle})))
    heir = scheduler.add(make_spec([2] * 5, 3), None, [2], 2, CONTEXT)[0]
    run_until_idle(scheduler, replica, worker, seen)  # the worker refuses to read what was not zeroed
    assert seen.tokens[heir] == expected_output([2] * 5, heir.seed, 3)
