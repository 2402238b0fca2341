"""The mock worker under the real scheduler: whatever the schedule, tokens are what the law says."""

from real_scheduler import worker_settings
from trivet_doubles.mock_frontend import MockFrontend
from trivet_doubles.mock_worker import Faults, MockWorker
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import expected_output
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import types_pb2

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
