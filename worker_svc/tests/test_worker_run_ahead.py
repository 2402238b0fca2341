"""Several tokens from one step: the same ones, a result for each, and an end as soon as there is news."""

import asyncio
import threading

import pytest
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import worker_pb2

PROMPT, OTHER = list(range(10, 33)), list(range(40, 52))
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4},
]


def tokens(result: worker_pb2.StepResult) -> list[int]:
    return unpack_i32(result.token_ids).tolist()


def run_ahead(driver, known, iterations: int, *, news_after: int = 1000) -> list[worker_pb2.StepResult]:
    """All results of one step; with `news_after` so many there is news."""
    results: list[worker_pb2.StepResult] = []

    def has_news() -> bool:
        return len(results) + 1 >= news_after

    step = driver.message(known=known, run_ahead=iterations)
    results.append(driver.runner.execute(step, has_news))
    while not results[-1].last_iteration:
        results.append(driver.runner.go_on(has_news))
    assert [result.iteration for result in results] == list(range(len(results)))
    return results


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "seeded", "penalised"])
def test_the_tokens_are_those_of_single_steps(driver, params) -> None:
    prompts = (PROMPT, OTHER)
    wanted = [driver.run(driver.request(prompt, **params), 9) for prompt in prompts]
    requests = [driver.request(prompt, **params) for prompt in prompts]
    first = driver.step(requests)
    got = [[token] for token in tokens(first)]
    for done in (0, 4):
        known = [(request.handle, len(prompt) + done, 1) for request, prompt in zip(requests, prompts, strict=True)]
        results = run_ahead(driver, known, 4)
        assert len(results) == 4
        for result in results:
            assert result.status == worker_pb2.STEP_STATUS_DONE
            assert bool(result.logprob_rows) == ("logprobs" in params)
            for row, token in enumerate(tokens(result)):
                got[row].append(token)
    assert got == wanted


def test_news_ends_it_and_the_step_behind_is_run_with_the_true_counts(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, temperature=0.0), 8)
    request = driver.request(PROMPT, temperature=0.0)
    got = tokens(driver.step([request]))
    results = run_ahead(driver, [(request.handle, len(PROMPT), 1)], 9, news_after=3)
    got += [token for result in results for token in tokens(result)]
    assert len(got) == 4
    behind = driver.step(known=[(request.handle, len(PROMPT) + 9, 1)])  # it left before the end was known
    got += tokens(behind)
    for index in (4, 5, 6):
        got += tokens(driver.step(known=[(request.handle, len(PROMPT) + index, 1)]))
    assert got == wanted


def test_a_count_that_nothing_explains_is_refused(driver) -> None:
    request = driver.request(PROMPT, temperature=0.0)
    driver.step([request])
    run_ahead(driver, [(request.handle, len(PROMPT), 1)], 4, news_after=2)
    with pytest.raises(TrivetError, match="is to run to token"):
        driver.step(known=[(request.handle, len(PROMPT) + 5, 1)])


@pytest.mark.parametrize("as_stop_token", [False, True])
def test_a_token_that_ends_a_request_ends_it(driver, as_stop_token: bool) -> None:
    wanted = driver.run(driver.request(PROMPT, temperature=0.0), 6)
    place = next(index for index in range(2, 6) if wanted[index] not in wanted[:index])
    extras = {"stop_token_ids": pack_i32([wanted[place]])} if as_stop_token else {}
    request = driver.request(PROMPT, temperature=0.0, **extras)
    if not as_stop_token:
        request.eos_token_ids = pack_i32([wanted[place]])
    driver.step([request])
    results = run_ahead(driver, [(request.handle, len(PROMPT), 1)], 12)
    assert len(results) == place
    assert tokens(results[-1]) == [wanted[place]]


def test_an_end_token_that_is_ignored_does_not(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, temperature=0.0), 2)
    request = driver.request(PROMPT, temperature=0.0, ignore_eos=True)
    request.eos_token_ids = pack_i32(wanted)
    driver.step([request])
    assert len(run_ahead(driver, [(request.handle, len(PROMPT), 1)], 5)) == 5


def test_an_iteration_that_fails_keeps_those_before_it(driver, monkeypatch) -> None:
    wanted = driver.run(driver.request(PROMPT, temperature=0.0), 6)
    request = driver.request(PROMPT, temperature=0.0)
    got = tokens(driver.step([request]))
    first = driver.runner.execute(driver.message(known=[(request.handle, len(PROMPT), 1)], run_ahead=5))
    assert not first.last_iteration
    with monkeypatch.context() as patch:
        patch.setattr("trivet_worker.runner.runner.put_sampled", lambda *_: (_ for _ in ()).throw(MemoryError))
        failed = driver.runner.go_on()
    assert (failed.status, failed.iteration, failed.last_iteration) == (worker_pb2.STEP_STATUS_FAILED, 1, True)
    got += tokens(first)
    skipped = driver.runner.execute(driver.message(known=[(request.handle, len(PROMPT) + 5, 1)]))
    assert skipped.status == worker_pb2.STEP_STATUS_SKIPPED
    got += tokens(driver.step(known=[(request.handle, len(PROMPT) + 1, 1)], resync=failed.step))
    for result in run_ahead(driver, [(request.handle, len(PROMPT) + 2, 1)], 3):
        got += tokens(result)
    assert got == wanted


def test_a_row_without_a_finite_logit_ends_it(driver) -> None:
    request = driver.request(PROMPT, temperature=0.0)
    driver.step([request])
    for cache in driver.runner._caches.values():
        cache.fill_(float("nan"))
    (result,) = run_ahead(driver, [(request.handle, len(PROMPT), 1)], 5)
    assert list(result.flags) == [worker_pb2.ROW_FLAG_NON_FINITE]


@pytest.mark.parametrize("wrong", ["a prompt", "too many", "no blocks", "beyond the context"])
def test_what_cannot_run_ahead_is_refused_whole(driver, wrong: str) -> None:
    request = driver.request(
        PROMPT, temperature=0.0, room=28 if wrong == "no blocks" else 40, scheduled=10 if wrong == "a prompt" else None
    )
    driver.step([request])
    known = {"a prompt": (request.handle, 10, 5)}.get(wrong, (request.handle, len(PROMPT), 1))
    iterations = {"too many": 65, "beyond the context": 60}.get(wrong, 6)
    with pytest.raises(TrivetError):
        driver.step(known=[known], run_ahead=iterations)


async def test_a_step_that_comes_ends_it_and_is_answered_next(party, driver, monkeypatch) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    assert (await stream.next("ready")).num_blocks == 64
    assert stream.hello.abilities.run_ahead > 1
    go_on, loop = driver.runner.go_on, asyncio.get_running_loop()
    is_in_it, may_leave = asyncio.Event(), threading.Event()

    def held(has_news):
        loop.call_soon_threadsafe(is_in_it.set)
        assert may_leave.wait(20)
        return go_on(has_news)

    monkeypatch.setattr(driver.runner, "go_on", held)
    request = driver.request(PROMPT, temperature=0.0)
    stream.send(driver.message([request]))
    stream.send(driver.message(known=[(request.handle, len(PROMPT), 1)], run_ahead=16))
    async with asyncio.timeout(20):
        await is_in_it.wait()
    ending = driver.message(finished=[request.handle])
    stream.send(ending)
    results = [await stream.next("result") for _ in range(2)]
    beat = await stream.next("heartbeat")
    while beat.last_step_received != ending.step:
        beat = await stream.next("heartbeat")
    may_leave.set()
    results += [await stream.next("result") for _ in range(2)]
    assert [(result.step, result.iteration, result.last_iteration) for result in results] == [
        (1, 0, True),
        (2, 0, False),
        (2, 1, True),
        (3, 0, True),
    ]
