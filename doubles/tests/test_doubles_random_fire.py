"""Two mock workers that fail in all ways at once, under the real scheduler and random requests: every token is what the law says."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_scheduler import running_scheduler, worker_settings
from trivet_doubles.mock_frontend import Child, MockFrontend
from trivet_doubles.mock_worker import Faults, MockWorker
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import Choices, expected_output
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import types_pb2

REQUESTS = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was sent."""

    prompt: list[int]
    seed: int
    max_tokens: int
    children: list[Child]

    async def check(self, choices: Choices) -> None:
        for index, child in enumerate(self.children):
            tokens = await child.until_ended(30)
            wanted = expected_output(self.prompt, child_seed(self.seed, index), self.max_tokens, choices)
            if child.finish == types_pb2.FINISH_REASON_ABORT:
                wanted = wanted[: len(tokens)]
            assert tokens == wanted


def ask(frontend: MockFrontend, chance: random.Random) -> Asked:
    """One of three beginnings, an end of its own, one to three children, of which the first is given up now and then."""
    base = chance.choice((0, 50, 100))
    prompt = [1 + (base + at) % 200 for at in range(chance.randint(1, 70))] + [chance.randint(1, 200) for _ in range(chance.randint(0, 5))]
    seed, max_tokens = chance.getrandbits(64), chance.randint(1, 40)
    children = frontend.add(prompt, max_tokens=max_tokens, seed=seed, n=chance.choice((1, 1, 1, 2, 3)))
    if chance.random() < 0.15:
        frontend.abort(children[0])
    return Asked(prompt, seed, max_tokens, children)


# Few enough failures that no request is given up: that takes sixteen in a row with others, four alone.
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_mixture_of_faults_changes_a_token(socket_folder: Path, model: DoubleModel, seed: int) -> None:
    chance = random.Random(seed)
    settings = {"run_ahead": (4, 16, 1)[seed % 3], "steps_in_flight": chance.choice((1, 2))}
    async with running_scheduler(f"unix:{socket_folder}/s.sock", **settings) as scheduler:
        await fire(scheduler, model, chance)


async def fire(scheduler: str, model: DoubleModel, chance: random.Random) -> None:
    faults = Faults(
        fail_step={chance.randint(1, 9)},
        fail_every=chance.choice((0, 7, 11)),
        out_of_memory_above=chance.choice((0, 30)),
        die_step=chance.choice((0, 25)),
    )
    one = MockWorker(worker_settings(scheduler, name="one", num_kv_blocks=chance.choice((30, 60, 200))), faults, model=model)
    two = MockWorker(worker_settings(scheduler, name="two", num_kv_blocks=chance.choice((60, 200))), Faults(fail_every=9), model=model)
    async with one, two, MockFrontend(scheduler) as frontend:
        asked = []
        for _ in range(REQUESTS):
            asked.append(ask(frontend, chance))
            if chance.random() < 0.3:
                await asyncio.sleep(0.005)  # so that requests come at any state of the others
        for request in asked:
            await request.check(one.law.choices)
        assert one.life.wrong_slots == two.life.wrong_slots == 0
