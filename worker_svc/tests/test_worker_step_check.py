"""A step that does not fit what the worker holds is refused before anything of it is applied."""

from collections.abc import Callable

import pytest
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u32, unpack_i32
from trivet_proto.v1 import types_pb2, worker_pb2

PROMPT = list(range(10, 33))
GREEDY = {"temperature": 0.0}
BLOCKS = 64  # of the driver's pool
Mend = Callable[[worker_pb2.Step], None]


def of_known(**arrays: bytes) -> Mend:
    def change(step: worker_pb2.Step) -> None:
        for name, value in arrays.items():
            setattr(step.known, name, value)

    return change


def of_new(**fields: object) -> Mend:
    def change(step: worker_pb2.Step) -> None:
        for name, value in fields.items():
            setattr(step.new_requests[0], name, value)

    return change


def of_step(**fields: bytes) -> Mend:
    def change(step: worker_pb2.Step) -> None:
        for name, value in fields.items():
            setattr(step, name, value)

    return change


def twice_new(step: worker_pb2.Step) -> None:
    step.new_requests.append(step.new_requests[0])


def twice_known(step: worker_pb2.Step) -> None:
    handle, count = step.known.handles, pack_i32([1, 1])
    step.known.handles, step.known.num_computed_tokens, step.known.num_scheduled_tokens = handle * 2, count, count
    step.known.new_block_counts = pack_i32([0, 0])


def new_but_held(step: worker_pb2.Step) -> None:
    step.new_requests[0].handle = int.from_bytes(step.known.handles, "little")


def finished_and_known(step: worker_pb2.Step) -> None:
    step.finished_handles = step.known.handles


WRONG: dict[str, tuple[Mend, str]] = {
    "an unknown handle": (of_known(handles=pack_u32([999])), "request 999, which this worker does not hold"),
    "a handle twice": (twice_known, "twice"),
    "finished and scheduled": (finished_and_known, "does not hold"),
    "counts that are too few": (of_known(num_scheduled_tokens=b""), "1 counts of tokens computed and 0 scheduled"),
    "counts that are too many": (of_known(num_computed_tokens=pack_i32([23, 1])), "2 counts"),
    "half a number": (of_known(num_computed_tokens=b"\0\0"), "multiple of 4"),
    "nothing to run": (of_known(num_scheduled_tokens=pack_i32([0])), "none to run"),
    "a negative count": (of_known(num_computed_tokens=pack_i32([-1])), "negative"),
    "tokens that are not there": (of_known(num_computed_tokens=pack_i32([24])), "to run to token 25; it has 24 tokens"),
    "tokens without blocks": (of_known(num_computed_tokens=pack_i32([2]), num_scheduled_tokens=pack_i32([100])), "10 blocks of 4"),
    "a block beyond the cache": (of_known(new_block_counts=pack_i32([1]), new_block_ids=pack_i32([BLOCKS])), "outside 0 to 63"),
    "a negative block": (of_known(new_block_counts=pack_i32([1]), new_block_ids=pack_i32([-1])), "outside"),
    "blocks nobody gets": (of_known(new_block_ids=pack_i32([5])), "there are 1 values"),
    "block counts of others": (of_known(new_block_counts=pack_i32([0, 0])), "2 counts of new blocks"),
    "more blocks than a context": (of_known(new_block_counts=pack_i32([30]), new_block_ids=pack_i32([5] * 30)), "40 blocks"),
    "drafts": (of_known(draft_counts=pack_i32([1])), "wants drafts"),
    "zeroing beyond the cache": (of_step(blocks_to_zero=pack_i32([BLOCKS])), "blocks_to_zero"),
    "copying onto the null block": (of_step(copy_sources=pack_i32([1]), copy_targets=pack_i32([0])), "copy_targets"),
    "copying one to two": (of_step(copy_sources=pack_i32([1]), copy_targets=pack_i32([2, 3])), "copied to 2"),
    "masks": (of_step(masked_handles=pack_u32([1])), "wants masks"),
    "a new request twice": (twice_new, "new but held already"),
    "a new request that is held": (new_but_held, "new but held already"),
    "no tokens": (of_new(token_ids=b"", num_prompt_tokens=0), "has 0 tokens"),
    "more than the context": (of_new(token_ids=pack_i32([1] * 129)), "takes 1 to 128"),
    "a token of another model": (of_new(token_ids=pack_i32([1, 96, 3])), "vocabulary of 96"),
    "a prompt longer than all": (of_new(num_prompt_tokens=4), "prompt of 4 among 3"),
    "no prompt": (of_new(num_prompt_tokens=0), "prompt of 0"),
    "running past its end": (of_new(num_scheduled_tokens=4), "token 4 of 3"),
    "too few blocks": (of_new(block_ids=b"", block_counts=pack_i32([0])), "with 0 blocks"),
    "a second group": (of_new(block_counts=pack_i32([1, 1])), "one group"),
    "a new request's block beyond the cache": (of_new(block_ids=pack_i32([BLOCKS, 1])), "block_ids"),
    "an adapter": (of_new(adapter="x"), "wants adapters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_refused_and_nothing_of_it_is_applied(driver, name: str) -> None:
    change, message = WRONG[name]
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 3)
    held = driver.request(PROMPT, **GREEDY)
    got = unpack_i32(driver.step([held]).token_ids).tolist()
    wrong = driver.message([driver.request([1, 2, 3], room=8, **GREEDY)], [(held.handle, len(PROMPT), 1)], finished=[12345])
    change(wrong)
    with pytest.raises(TrivetError, match=message) as refused:
        driver.runner.execute(wrong)
    assert refused.value.kind in (ErrorKind.ABORTED, ErrorKind.INVALID_ARGUMENT, ErrorKind.UNIMPLEMENTED)
    assert len(driver.runner._batch) == 1
    for index in range(2):
        got += unpack_i32(driver.step(known=[(held.handle, len(PROMPT) + index, 1)]).token_ids).tolist()
    assert got == wanted


def test_a_step_larger_than_announced_is_refused(driver) -> None:
    requests = [driver.request([1] * 65, room=68, **GREEDY) for _ in range(4)]
    for request in requests:
        request.block_ids = requests[0].block_ids
    with pytest.raises(TrivetError, match="260 tokens, this worker takes 256"):
        driver.runner.execute(driver.message(requests))


def test_a_request_whose_sampling_arrays_do_not_fit_ends_alone(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 1)
    bad = driver.request([1, 2], room=4, logit_bias_ids=pack_i32([1, 2]), logit_bias_values=b"\0\0\0\0", **GREEDY)
    worse = driver.request([1, 2], room=4, bad_words_ids=pack_i32([1]), bad_words_counts=pack_i32([3]), **GREEDY)
    result = driver.step([bad, worse, driver.request(PROMPT, **GREEDY)])
    assert list(result.flags) == [worker_pb2.ROW_FLAG_ALL_MASKED] * 2 + [0]
    assert unpack_i32(result.token_ids).tolist() == wanted


def test_the_step_behind_one_that_gave_no_token_is_taken(driver) -> None:
    bad, good = driver.request([1, 2], room=4, allowed_token_ids=pack_i32([10**6]), **GREEDY), driver.request(PROMPT, **GREEDY)
    driver.step([bad, good])
    behind = driver.step(known=[(bad.handle, 2, 1), (good.handle, len(PROMPT), 1)])  # sent before the flag was known
    assert unpack_i32(behind.token_counts).tolist() == [0, 1]


@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.8, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_request_that_met_want_of_memory_has_the_tokens_it_would_have_had(driver, params, failing: int) -> None:
    wanted = driver.run(driver.request(PROMPT, seed=5, **params), 6)
    request = driver.request(PROMPT, seed=5, **params)
    if failing == 0:
        failed = driver.step_out_of_memory([request])
        got = unpack_i32(driver.step(known=[(request.handle, 0, 10)], resync=failed.step).token_ids).tolist()  # again, smaller
        got += unpack_i32(driver.step(known=[(request.handle, 10, len(PROMPT) - 10)]).token_ids).tolist()
    else:
        got = unpack_i32(driver.step([request]).token_ids).tolist()
    for index in range(5):
        known = [(request.handle, len(PROMPT) + index, 1)]
        resync = None
        if index + 1 == failing:
            failed = driver.step_out_of_memory(known=known)
            assert failed.error.kind == types_pb2.ERROR_KIND_OUT_OF_MEMORY
            behind = driver.message(known=[(request.handle, len(PROMPT) + index + 1, 1)])
            assert driver.runner.execute(behind).status == worker_pb2.STEP_STATUS_SKIPPED
            resync = failed.step
        got += unpack_i32(driver.step(known=known, resync=resync).token_ids).tolist()
    assert got == wanted


def test_another_failure_is_not_to_be_tried_again(driver, monkeypatch, caplog) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trivet_worker.runner.runner.put_sampled", lambda *_: 1 // 0)
        failed = driver.runner.execute(driver.message([driver.request(PROMPT, **GREEDY)]))
    assert failed.error.kind == types_pb2.ERROR_KIND_INTERNAL
    assert not failed.error.retryable
    assert "ZeroDivisionError" in caplog.text
