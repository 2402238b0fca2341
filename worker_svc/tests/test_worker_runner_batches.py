"""Who else is in the batch does not matter, nor what was in the memory before."""

import asyncio
import threading

import numpy as np
import pytest
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_f32, pack_i32, unpack_i32, unpack_u32
from trivet_proto.v1 import worker_pb2
from trivet_worker.runner.steady import SteadyDecodes
from trivet_worker.step_thread import StepThread

PROMPT = list(range(10, 33))
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "ignore_eos": True}


def by_handle(result) -> dict[int, list[int]]:
    counts, ids = unpack_i32(result.token_counts), unpack_i32(result.token_ids).tolist()
    ends = np.cumsum(counts)
    return {
        handle: ids[end - count : end]
        for handle, count, end in zip(unpack_u32(result.handles).tolist(), counts, ends.tolist(), strict=True)
    }


def generate_among(driver, request, others, tokens: int, *, first: bool) -> list[int]:
    """Tokens of `request` while the others run beside it, before or behind it in the batch."""
    rows = [request, *others] if first else [*others, request]
    got = by_handle(driver.step(rows))[request.handle]
    lengths = {row.handle: len(unpack_i32(row.token_ids)) for row in rows}
    for index in range(tokens - 1):
        got += by_handle(driver.step(known=[(handle, length + index, 1) for handle, length in lengths.items()]))[request.handle]
    driver.step(finished=list(lengths))
    return got


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("others", [1, 7])
@pytest.mark.parametrize("seed", [0, 42])
def test_a_seeded_request_has_its_tokens_whoever_is_beside_it(driver, seed, others, first, tools) -> None:
    params = SEEDED | {"top_p": 0.95}
    alone = driver.run(driver.request(PROMPT, seed=seed, **params), 8)
    driver = tools.StepDriver(driver.loaded, num_blocks=128)
    crowd = [driver.request([index] * (index + 2), seed=1000 + index, room=20, temperature=index % 3 * 0.7) for index in range(others)]
    assert generate_among(driver, driver.request(PROMPT, seed=seed, **params), crowd, 8, first=first) == alone


def tokens_of_a_mixture(driver) -> list[dict[int, list[int]]]:
    """Decodes that go on, are joined, left, left out of a step and given blocks: what each step answers."""
    requests = [driver.request(PROMPT[index:], seed=index, temperature=index * 0.5) for index in range(3)]
    late = driver.request(PROMPT[:7])
    first, second, third = (request.handle for request in requests)
    lengths = {request.handle: len(unpack_i32(request.token_ids)) for request in [*requests, late]}
    answers = [by_handle(driver.step(requests))]
    blocks = iter(range(41, 63))

    def go_on(*handles: int, grown: int | None = None, **others: object) -> None:
        step = driver.message(known=[(handle, lengths[handle], 1) for handle in handles], **others)
        if grown is not None:
            step.known.new_block_counts = pack_i32([2 * (handle == grown) for handle in handles])
            step.known.new_block_ids = pack_i32([next(blocks), next(blocks)])
        answers.append(by_handle(driver.runner.execute(step)))
        for handle in handles:
            lengths[handle] += 1

    go_on(first, second, third, grown=first)
    go_on(first, second, third, grown=third)
    go_on(first, second, third, blocks_to_zero=pack_i32([63]))
    go_on(first, third, new=[late])
    go_on(third, first, late.handle)
    go_on(third, first, late.handle, finished=[second])
    for _ in range(4):
        go_on(third, first, late.handle)
    driver.step(finished=[first, third, late.handle])
    return answers


def test_the_short_way_of_steps_that_go_on_changes_nothing(driver, tools, monkeypatch) -> None:
    short = tokens_of_a_mixture(tools.StepDriver(driver.loaded))
    taken: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(SteadyDecodes, "take", lambda *_: taken.append(True))
        assert tokens_of_a_mixture(tools.StepDriver(driver.loaded)) == short
    assert taken, "steps would have gone it"


@pytest.mark.parametrize("wrong", ["blocks", "counts", "reach"])
def test_a_wrong_step_does_not_get_through_the_short_way(driver, wrong: str) -> None:
    request = driver.request(PROMPT, room=24, **GREEDY)
    driver.step([request])
    step = driver.message(known=[(request.handle, len(PROMPT) + (wrong == "reach"), 1)])
    if wrong != "reach":
        step.known.new_block_ids = pack_i32([64 if wrong == "blocks" else 5])
        step.known.new_block_counts = pack_i32([1 if wrong == "blocks" else 2])
    with pytest.raises(TrivetError):
        driver.runner.execute(step)


def test_a_slots_second_owner_inherits_nothing(driver) -> None:
    """One slot, taken again and again: by a request with everything set, then by a plain one."""
    wanted = driver.run(driver.request(PROMPT, room=28, **GREEDY), 4)
    loaded = {
        "temperature": 1.9, "top_k": 3, "min_p": 0.2, "top_p": 0.5, "presence_penalty": 2.0, "repetition_penalty": 1.8, "min_tokens": 3,
        "logit_bias_ids": pack_i32([5]), "logit_bias_values": pack_f32([100.0]), "logprobs": 4, "prompt_logprobs": 2,
        "bad_words_ids": pack_i32([wanted[0]]), "bad_words_counts": pack_i32([1]),
    }  # fmt: skip
    busy = driver.request(PROMPT[:9], room=16, **loaded)
    driver.run(busy, 3)
    plain = driver.request(PROMPT, room=28, **GREEDY)
    result = driver.step([plain])
    assert not result.prompt_logprobs
    assert not result.logprob_rows
    got = unpack_i32(result.token_ids).tolist()
    for index in range(3):
        got += unpack_i32(driver.step(known=[(plain.handle, len(PROMPT) + index, 1)]).token_ids).tolist()
    assert got == wanted


def test_chunks_of_two_penalise_the_same_tokens(driver) -> None:
    params = {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0}
    wanted = driver.run(driver.request(PROMPT, **params), 6)
    request = driver.request(PROMPT, scheduled=2, **params)
    driver.step([request])
    for computed in range(2, 22, 2):
        assert not driver.step(known=[(request.handle, computed, 2)]).token_ids
    got = unpack_i32(driver.step(known=[(request.handle, 22, 1)]).token_ids).tolist()
    for index in range(5):
        got += unpack_i32(driver.step(known=[(request.handle, len(PROMPT) + index, 1)]).token_ids).tolist()
    assert got == wanted


def test_what_was_poisoned_in_one_epoch_is_not_read_in_the_next(driver, tools) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 4)
    for cache in driver.runner._caches.values():
        cache[:] = float("nan")
    fresh = tools.StepDriver(driver.loaded, num_blocks=64)  # as many blocks as before
    assert fresh.run(fresh.request(PROMPT, **GREEDY), 4) == wanted


def test_a_skipped_step_zeroes_blocks_all_the_same(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 2)
    request = driver.request(PROMPT, **GREEDY)
    for cache in driver.runner._caches.values():
        cache[unpack_i32(request.block_ids).tolist()] = float("nan")
    failed = driver.step_out_of_memory([driver.request([1, 2], room=4, **GREEDY)])
    skipped = driver.runner.execute(driver.message([request], blocks_to_zero=request.block_ids))
    assert skipped.status == worker_pb2.STEP_STATUS_SKIPPED
    got = unpack_i32(driver.step(known=[(request.handle, 0, len(PROMPT))], resync=failed.step).token_ids).tolist()
    got += unpack_i32(driver.step(known=[(request.handle, len(PROMPT), 1)]).token_ids).tolist()
    assert got == wanted


def test_a_bias_beyond_the_vocabulary_does_not_take_the_step_with_it(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 1)
    odd = driver.request([1, 2], room=4, logit_bias_ids=pack_i32([10**6]), logit_bias_values=pack_f32([5.0]), **GREEDY)
    good = driver.request(PROMPT, **GREEDY)
    assert by_handle(driver.step([odd, good]))[good.handle] == wanted


def test_a_finished_and_a_new_request_in_one_step_share_the_last_slot(driver) -> None:
    held = [driver.request([7, 8], room=4, **GREEDY) for _ in range(8)]  # as many as there are slots
    driver.step(held)
    late = driver.request(PROMPT, room=24, **GREEDY)
    assert driver.step([late], finished=[held[3].handle]).token_ids
    with pytest.raises(TrivetError, match="there is room for 0"):
        driver.runner.execute(driver.message([driver.request([1], room=4, **GREEDY)]))


async def test_a_stopped_thread_finishes_what_it_holds_and_takes_no_more() -> None:
    thread, release = StepThread(), threading.Event()
    running = asyncio.ensure_future(thread.call(lambda: release.wait(10)))
    await asyncio.sleep(0)
    thread.stop()
    with pytest.raises(asyncio.CancelledError):
        await thread.call(lambda: 1)
    release.set()
    assert await asyncio.wait_for(running, 10)
