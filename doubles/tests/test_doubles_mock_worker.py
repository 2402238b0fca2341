"""The mock worker under the real scheduler: whatever the schedule, tokens are what the law says."""

import asyncio
from pathlib import Path

import pytest
from real_scheduler import running_scheduler, worker_settings
from trivet_doubles.mock_frontend import MockFrontend
from trivet_doubles.mock_worker import Faults, MockWorker
from trivet_doubles.model import DoubleModel, load_double_model
from trivet_doubles.tokens import expected_output
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import types_pb2, worker_pb2

LONG = [1 + number % 200 for number in range(150)]  # more than two steps' tokens


async def test_a_prompt_in_chunks_and_its_repetition_from_the_cache_give_the_same(scheduler: str, model: DoubleModel) -> None:
    async with MockWorker(worker_settings(scheduler), model=model) as worker, MockFrontend(scheduler) as frontend:
        wanted = expected_output(LONG, 7, 20, worker.law.choices)
        (first,) = frontend.add(LONG, max_tokens=20, seed=7)
        assert await first.until_ended() == wanted
        (second,) = frontend.add(LONG, max_tokens=20, seed=7)
        assert await second.until_ended() == wanted
        assert first.cached_tokens == 0
        assert second.cached_tokens == 148
        assert second.finish == types_pb2.FINISH_REASON_LENGTH
        assert worker.life.wrong_slots == 0


async def test_children_follow_their_own_seeds(scheduler: str, model: DoubleModel) -> None:
    async with MockWorker(worker_settings(scheduler), model=model) as worker, MockFrontend(scheduler) as frontend:
        children = frontend.add(LONG, max_tokens=8, seed=5, n=3)
        for index, child in enumerate(children):
            assert await child.until_ended() == expected_output(LONG, child_seed(5, index), 8, worker.law.choices)
        assert worker.life.wrong_slots == 0


async def run_many(frontend: MockFrontend, worker: MockWorker, count: int, *, length: int = 23, max_tokens: int = 30) -> None:
    """Many requests at once, of which pairs share their beginning; each must get what the law says."""
    prompts = [[1 + (index // 2 + at) % 200 for at in range(length - index % 2)] for index in range(count)]
    children = [frontend.add(prompt, max_tokens=max_tokens, seed=seed)[0] for seed, prompt in enumerate(prompts)]
    for seed, (prompt, child) in enumerate(zip(prompts, children, strict=True)):
        assert await child.until_ended(20) == expected_output(prompt, seed, max_tokens, worker.law.choices), f"request {seed}"


async def test_a_pool_too_small_for_all_preempts_and_nobody_notices(scheduler: str, model: DoubleModel) -> None:
    settings = worker_settings(scheduler, num_kv_blocks=40)
    async with MockWorker(settings, model=model) as worker, MockFrontend(scheduler) as frontend:
        await run_many(frontend, worker, 12)
        await frontend.until(lambda: frontend.load is not None and frontend.load.preemptions_total > 0)
        assert worker.life.wrong_slots == 0


async def test_failed_steps_with_the_next_in_flight_change_no_token(scheduler: str, model: DoubleModel) -> None:
    faults = Faults(fail_step={1, 2}, fail_every=5)
    async with MockWorker(worker_settings(scheduler), faults, model=model) as worker, MockFrontend(scheduler) as frontend:
        await run_many(frontend, worker, 8)
        assert worker.life.wrong_slots == 0


async def test_a_step_too_large_for_memory_is_tried_again_smaller(scheduler: str, model: DoubleModel) -> None:
    faults = Faults(out_of_memory_above=40)
    async with MockWorker(worker_settings(scheduler), faults, model=model) as worker, MockFrontend(scheduler) as frontend:
        (child,) = frontend.add(LONG, max_tokens=10, seed=1)
        assert await child.until_ended() == expected_output(LONG, 1, 10, worker.law.choices)
        await run_many(frontend, worker, 6)


async def test_a_worker_that_dies_and_returns_goes_on_with_the_same_tokens(scheduler: str, model: DoubleModel) -> None:
    settings = worker_settings(scheduler)
    mortal = MockWorker(settings, Faults(die_step=6), model=model)
    async with mortal, MockFrontend(scheduler) as frontend:
        (child,) = frontend.add(LONG, max_tokens=40, seed=9)
        await asyncio.wait_for(mortal.died.wait(), 10)
        assert not child.ended.is_set()
        async with MockWorker(settings, model=model) as heir:
            assert await child.until_ended() == expected_output(LONG, 9, 40, heir.law.choices)
            assert heir.life.wrong_slots == 0


async def test_what_ran_on_a_lost_worker_goes_on_at_another(scheduler: str, model: DoubleModel) -> None:
    mortal = MockWorker(worker_settings(scheduler, name="mortal"), Faults(die_step=12), model=model)
    async with MockWorker(worker_settings(scheduler, name="other"), model=model) as other, mortal, MockFrontend(scheduler) as frontend:
        await mortal.until_attached()
        await frontend.until(lambda: frontend.load is not None and frontend.load.replicas_ready == 2)
        await run_many(frontend, other, 10)
        assert mortal.died.is_set()
        assert other.life.wrong_slots == 0


async def test_a_worker_redials_with_an_empty_pool_when_its_scheduler_was_away(socket_folder: Path, model: DoubleModel) -> None:
    address = f"unix:{socket_folder}/s.sock"
    async with MockWorker(worker_settings(address), model=model) as worker:
        for attachments in (1, 2):
            async with running_scheduler(address), MockFrontend(address) as frontend:
                (child,) = frontend.add(LONG, max_tokens=5, seed=4)
                assert await child.until_ended() == expected_output(LONG, 4, 5, worker.law.choices)
                assert worker.life.attachments == attachments
        assert worker.life.wrong_slots == 0


async def test_a_draining_worker_leaves_once_the_scheduler_lets_it_go(scheduler: str, model: DoubleModel) -> None:
    worker = MockWorker(worker_settings(scheduler), model=model)
    running = asyncio.create_task(worker.run())
    await worker.until_attached()
    worker.drain()
    await asyncio.wait_for(running, 10)
    assert not worker.life.is_attached


async def test_a_worker_that_cannot_serve_there_says_so(scheduler: str, model: DoubleModel) -> None:
    async with MockWorker(worker_settings(scheduler), model=model) as worker:
        await worker.until_attached()
        stranger = MockWorker(worker_settings(scheduler, name="stranger"), model=load_double_model("", is_synthetic=False))
        with pytest.raises(TrivetError, match="serves another model") as refused:
            await asyncio.wait_for(stranger.run(), 10)
        assert refused.value.kind is ErrorKind.FAILED_PRECONDITION


async def test_of_two_workers_with_one_name_the_older_leaves_and_says_why(scheduler: str, model: DoubleModel) -> None:
    older = MockWorker(worker_settings(scheduler), model=model)
    running = asyncio.create_task(older.run())
    async with asyncio.timeout(10):
        while not older.life.is_attached:
            await asyncio.sleep(0.005)
        async with MockWorker(worker_settings(scheduler), model=model) as newer, MockFrontend(scheduler) as frontend:
            with pytest.raises(TrivetError, match="the name mock: give each worker its own --name") as taken:
                await running
            assert taken.value.kind is ErrorKind.ALREADY_EXISTS
            await newer.until_attached()
            (child,) = frontend.add([1, 2], seed=1)
            assert await child.until_ended() == expected_output([1, 2], 1, 16, newer.law.choices)


async def test_logprobs_come_for_every_token_and_are_always_the_same(scheduler: str, model: DoubleModel) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)
    async with MockWorker(worker_settings(scheduler), model=model) as worker, MockFrontend(scheduler) as frontend:
        children = [frontend.add(LONG, seed=2, sampling=sampling)[0] for _ in range(2)]
        for child in children:
            assert await child.until_ended() == expected_output(LONG, 2, 5, worker.law.choices)
        asked, again = children[0].logprobs, children[1].logprobs
        assert asked == again
        assert [ids[0] for ids, _ in asked] == children[0].token_ids
        assert all(len(set(ids[1:])) == 2 and ids[0] == ids[1] for ids, _ in asked)
        assert all(0 > values[0] == values[1] > values[2] for _, values in asked)
        assert list(children[0].prompt_logprobs) == list(range(1, len(LONG)))
        assert all(ids == (LONG[at], LONG[at]) for at, (ids, _) in children[0].prompt_logprobs.items())


async def test_requests_narrow_the_tokens_and_an_end_token_ends_them(scheduler: str, model: DoubleModel) -> None:
    (end,) = model.end_ids
    async with MockWorker(worker_settings(scheduler), model=model) as worker, MockFrontend(scheduler) as frontend:
        allowed = types_pb2.SamplingParams(max_tokens=12, allowed_token_ids=pack_i32([300, 301]))
        forced = types_pb2.SamplingParams(max_tokens=12, logit_bias_ids=pack_i32([5, end]), logit_bias_values=pack_f32([1, 100]))
        plain, narrow, ended = [frontend.add(LONG, sampling=one)[0] for one in (types_pb2.SamplingParams(max_tokens=12), allowed, forced)]
        assert await plain.until_ended() == expected_output(LONG, 0, 12, worker.law.choices)
        assert set(await narrow.until_ended()) == {300, 301}
        assert await ended.until_ended() == [end]
        assert ended.finish == types_pb2.FINISH_REASON_STOP
        assert ended.stop_token == end


async def test_a_row_without_finite_logits_ends_alone(scheduler: str, model: DoubleModel) -> None:
    faults = Faults(non_finite_step={1})
    async with MockWorker(worker_settings(scheduler), faults, model=model) as worker, MockFrontend(scheduler) as frontend:
        (first,), (second,) = frontend.add([1, 2], seed=1), frontend.add([1, 2, 3], seed=1)
        with pytest.raises(TrivetError) as broken:
            await first.until_ended()
        assert broken.value.kind is ErrorKind.NON_FINITE
        assert await second.until_ended() == expected_output([1, 2, 3], 1, 16, worker.law.choices)


async def test_a_worker_that_runs_ahead_gives_the_same_tokens_from_fewer_steps(socket_folder: Path, model: DoubleModel) -> None:
    sent = {}
    for run_ahead in (1, 16):
        results: list[worker_pb2.StepResult] = []
        async with running_scheduler(f"unix:{socket_folder}/{run_ahead}.sock", run_ahead=run_ahead) as address:
            worker = MockWorker(worker_settings(address), model=model)
            worker.life.observe = results.append
            async with worker, MockFrontend(address) as frontend:
                children = [frontend.add([at, 5, 6], max_tokens=60, seed=at)[0] for at in range(1, 4)]
                for at, child in enumerate(children, start=1):
                    assert await child.until_ended() == expected_output([at, 5, 6], at, 60, worker.law.choices)
                assert worker.life.wrong_slots == 0
        sent[run_ahead] = len({result.step for result in results})
    assert sent[1] >= 60
    assert sent[16] <= 20


async def test_an_abort_reaches_a_worker_that_runs_ahead(socket_folder: Path, model: DoubleModel) -> None:
    async with running_scheduler(f"unix:{socket_folder}/s.sock", run_ahead=64) as address:
        worker = MockWorker(worker_settings(address, step_time=0.02), model=model)
        async with worker, MockFrontend(address) as frontend:
            (child,) = frontend.add([1, 2, 3], max_tokens=500, seed=1)
            await frontend.until(lambda: len(child.token_ids) >= 5)
            frontend.abort(child)
            await child.until_ended()
            async with asyncio.timeout(10):
                while worker.life.num_held:
                    await asyncio.sleep(0.005)
            assert len(child.token_ids) < 20
            assert worker.life.steps < 25
