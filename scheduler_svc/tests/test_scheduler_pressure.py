"""Too few blocks, and long prompts beside running streams: what users see stays the same."""

import pytest
from model_worker import BLOCK, Collected, ModelWorker, expected_output, make_replica, make_scheduler, make_spec, run_until_idle
from trivet_scheduler.core import Scheduler
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status

CONTEXT = 10_000

# Preemption by recomputation: 8 requests of 40 + 60 tokens, where blocks for about three of them are there.

PROMPT, OUTPUT, REQUESTS = 40, 60, 8
CRAMPED = 3 * (PROMPT + OUTPUT) // BLOCK + 1
AMPLE = 2 * REQUESTS * (PROMPT + OUTPUT) // BLOCK


def run_eight(num_blocks: int, *, budget: int, threshold: int, caching: bool) -> tuple[Scheduler, list[Request], Collected]:
    scheduler = make_scheduler(enable_prefix_caching=caching, long_prefill_token_threshold=threshold)
    replica, seen = make_replica(num_blocks, tokens=budget), Collected()
    scheduler.attach(replica)
    prompts = [[7] * (PROMPT // 2) + [index] * (PROMPT // 2) for index in range(REQUESTS)]
    requests = [
        scheduler.add(make_spec(prompt, OUTPUT, logprobs=1), None, [index], index, CONTEXT)[0] for index, prompt in enumerate(prompts)
    ]
    run_until_idle(scheduler, replica, ModelWorker(), seen)
    assert replica.kv.pool.num_free == replica.kv.pool.capacity
    return scheduler, requests, seen


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize(("budget", "threshold"), [(512, 0), (16, 0), (64, 8)], ids=["whole prompts", "chunks", "several chunks a step"])
def test_preempted_requests_give_what_they_give_with_a_large_pool(budget: int, threshold: int, caching: bool) -> None:
    cramped, requests, seen = run_eight(CRAMPED, budget=budget, threshold=threshold, caching=caching)
    ample, undisturbed, wanted = run_eight(AMPLE, budget=budget, threshold=threshold, caching=caching)
    assert cramped.totals.preemptions > 0
    assert ample.totals.preemptions == 0
    for request, other in zip(requests, undisturbed, strict=True):
        assert seen.tokens[request] == wanted.tokens[other] == expected_output(request.spec.prompt.tolist(), request.seed, OUTPUT)
        assert seen.logprobs[request] == wanted.logprobs[other] == seen.tokens[request]
        assert seen.finishes[request] == [Status.FINISHED_LENGTH]
        assert len(seen.tokens[request]) == OUTPUT
    assert cramped.totals.generation_tokens == ample.totals.generation_tokens == REQUESTS * OUTPUT


# A running stream A, then ten prompts of 4000 tokens, then a short request C, with 256 tokens a step.

BUDGET, LONG, LONGS, SHORT = 256, 4000, 10, 10


class Crowd:
    """The step in which each request gave its first token, and A's tokens by step."""

    def __init__(self, *, threshold: int, steps_before_c: int) -> None:
        self.scheduler = make_scheduler(steps_in_flight=1, long_prefill_token_threshold=threshold)
        self.replica: Replica = make_replica((LONGS + 1) * LONG // BLOCK + 200, seqs=32, tokens=BUDGET)
        self.scheduler.attach(self.replica)
        self.worker = ModelWorker()
        self.steps = self.work = 0
        self.first_token: dict[Request, int] = {}
        self.stream = self.add([1], 600, handle=1)
        self.step()
        self.longs = [self.add([index] * LONG, 2, handle=index + 2) for index in range(LONGS)]
        for _ in range(steps_before_c):
            self.step()
        self.short = self.add([77] * SHORT, 2, handle=50)
        while len(self.scheduler.requests) > 1:
            self.step()

    def add(self, prompt: list[int], count: int, *, handle: int) -> Request:
        return self.scheduler.add(make_spec(prompt, count), None, [handle], handle, CONTEXT)[0]

    def step(self) -> None:
        """Of which A has one token, and which keeps to the budget."""
        before = len(self.stream.output)
        plan = self.scheduler.schedule(self.replica)
        assert 0 < plan.num_tokens <= BUDGET
        self.scheduler.update(self.replica, self.worker.run(plan))
        self.steps += 1
        self.work += plan.num_tokens
        for delta in self.scheduler.take_deltas():
            if delta.token_ids:
                self.first_token.setdefault(delta.request, self.steps)
        assert len(self.stream.output) == before + 1, "A has a token in every step"


@pytest.mark.parametrize("threshold", [0, 64], ids=["one prompt after another", "several prompts at a time"])
def test_a_stream_has_its_token_in_every_step_while_long_prompts_are_computed(threshold: int) -> None:
    crowd = Crowd(threshold=threshold, steps_before_c=20)
    firsts = [crowd.first_token[request] for request in crowd.longs]
    assert firsts == sorted(firsts), "in the order in which they came"
    if threshold:
        assert crowd.first_token[crowd.short] < firsts[-1], "C need not wait for the last of the long prompts"
    else:
        assert crowd.first_token[crowd.short] >= firsts[-1] - 1
    # Nothing is computed twice: each prompt once, and each output token but the last.
    assert crowd.work == LONGS * (LONG + 1) + (SHORT + 1) + crowd.steps
