"""A worker without a model: tokens are a function of what came before, so every schedule must give the same output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from trivet_chassis.clock import ManualClock
from trivet_proto.v1 import types_pb2
from trivet_scheduler.core import CoreSettings, Scheduler
from trivet_scheduler.core.answers import FLAG_NON_FINITE
from trivet_scheduler.kv.coordinator import KVCacheCoordinator
from trivet_scheduler.kv.hashing import HashKeys
from trivet_scheduler.kv.memory import configure
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.kv.specs import FullAttentionSpec
from trivet_scheduler.plan import LogprobArrays, StepOutcome, StepPlan, StepStatus
from trivet_scheduler.replica import Replica, ReplicaLimits
from trivet_scheduler.request import Request, RequestSpec, Status

BLOCK = 4
VOCABULARY = 1000


def fold(tokens: Iterable[int], start: int = 0) -> int:
    """A number for all tokens so far, in their order."""
    for token in tokens:
        start = hash((start, token))
    return start


def next_token(folded: int, seed: int) -> int:
    return hash((folded, seed)) % VOCABULARY


def expected_output(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    folded, output = fold(prompt), []
    for _ in range(count):
        output.append(next_token(folded, seed))
        folded = fold(output[-1:], folded)
    return output


# A slot of a block: the token that it was written for, and all tokens up to it, folded.
Slot = tuple[int, int]
UNWRITTEN, GARBAGE = (-1, -1), (-2, -2)  # nothing; what a step that failed may leave behind


@dataclass
class Held:
    """A request as a worker holds it."""

    ids: list[int]
    slots: list[Slot]  # what its blocks should hold
    blocks: list[int]
    seed: int
    samples: bool
    num_prompt: int
    reports_prompt_from: int | None  # first prompt position without reported logprobs; None: none are wanted
    gives_logprobs: bool
    is_broken: bool = False  # its logits were not finite
    left_out: int = 0  # iterations of its last step that were not run; the step behind that may not know

    def append(self, token: int) -> None:
        self.ids.append(token)
        self.slots.append((token, fold((token,), self.slots[-1][1] if self.slots else 0)))


@dataclass
class ModelWorker:
    """Computes each token from what the blocks hold, so that a block with another prefix's content gives another token."""

    block_size: int = BLOCK
    strict: bool = True  # fail at once where a block does not hold what it should, instead of giving wrong text
    held: dict[int, Held] = field(default_factory=dict)
    content: dict[int, list[Slot]] = field(default_factory=dict)  # by block
    poisoned: dict[int, int] = field(default_factory=dict)  # block → handle whose keys and values in it are not finite
    at_hand: tuple[int, int, list[tuple[int, int, int]]] | None = None  # a step that goes on: number, next iteration, rows

    def run(self, plan: StepPlan, *, fail: bool = False, broken: frozenset[int] = frozenset(), ends: bool = True) -> StepOutcome:
        """Answer a step, or the next iteration of the one at hand; `broken` handles get logits that are not finite.

        It goes on while it may and `ends` is not said.
        """
        iteration, rows = 0, []
        if self.at_hand is None:
            rows = self._keep_book(plan)
        else:
            number, iteration, rows = self.at_hand
            assert number == plan.number, "another step while one goes on"
        result = self._run_rows(plan, rows, fail=fail, broken=broken)
        is_last = ends or fail or iteration + 1 == plan.run_ahead or any(result.flags)
        self.at_hand = None if is_last else (plan.number, iteration + 1, [(handle, computed + 1, 1) for handle, computed, _ in rows])
        for handle, _, _ in rows if is_last else ():
            self.held[handle].left_out = plan.run_ahead - 1 - iteration
        return replace(result, iteration=iteration, is_last=is_last)

    def _run_rows(self, plan: StepPlan, rows: list[tuple[int, int, int]], *, fail: bool, broken: frozenset[int]) -> StepOutcome:
        if fail:
            for handle, computed, scheduled in rows:
                for position in range(computed, computed + scheduled):
                    self._write(self.held[handle], position, GARBAGE)
            return outcome(plan.number, StepStatus.FAILED, [], [], [])
        tokens, counts, flags, prompts = [], [], [], []
        logprobs: dict[int, int] = {}
        for row, (handle, computed, scheduled) in enumerate(rows):
            held = self.held[handle]
            is_last = computed + scheduled == len(held.ids)
            if handle in broken and is_last and held.samples:
                held.is_broken = True
                flags.append(FLAG_NON_FINITE)
            else:
                flags.append(0)
            if held.is_broken:
                # Its end is on the way; until then it may run on, with tokens that it does not have.
                self._poison(handle, held, computed, computed + scheduled)
                counts.append(0)
                continue
            for position in range(computed, computed + scheduled):
                assert position < len(held.ids), "a token that does not exist is run"
                self._write(held, position, held.slots[position])
            read = self._read(handle, held, computed + scheduled)
            if held.reports_prompt_from is not None:
                first, last = max(computed + 1, held.reports_prompt_from), min(computed + scheduled, held.num_prompt - 1)
                if first <= last:
                    prompts.append((handle, first, types_pb2.Logprobs(counts=bytes(4 * (last + 1 - first)))))
            if is_last and held.samples:
                tokens.append(next_token(fold(token for token, _ in read), held.seed))
                held.append(tokens[-1])
                if held.gives_logprobs:
                    logprobs[row] = tokens[-1]
            counts.append(int(is_last and held.samples))
        return outcome(plan.number, StepStatus.DONE, [handle for handle, _, _ in rows], counts, tokens, flags, prompts, logprobs)

    def skip(self, plan: StepPlan) -> StepOutcome:
        """Behind a step that failed: what it says of requests and blocks holds, nothing of it is run."""
        self._keep_book(plan, is_skipped=True)
        return outcome(plan.number, StepStatus.SKIPPED, [], [], [])

    def _keep_book(self, plan: StepPlan, *, is_skipped: bool = False) -> list[tuple[int, int, int]]:
        """Rows of a step: handle, tokens computed, tokens to run."""
        for handle in plan.finished_handles:
            self.held.pop(handle, None)
        for block in plan.blocks_to_zero:
            self.content.pop(block, None)
            self.poisoned.pop(block, None)
        rows = []
        for work in plan.new:
            request, sampling = work.request, work.request.spec.sampling
            self.held[work.handle] = Held(
                [],
                [],
                work.block_ids.tolist(),
                request.seed,
                samples=not (sampling.HasField("max_tokens") and sampling.max_tokens == 0),
                num_prompt=request.num_prompt,
                reports_prompt_from=request.prompt_logprobs_done if sampling.HasField("prompt_logprobs") and request.child == 0 else None,
                gives_logprobs=sampling.HasField("logprobs"),
            )
            for token in work.token_ids.tolist():
                self.held[work.handle].append(token)
            rows.append((work.handle, work.num_computed, work.num_scheduled))
        at = 0
        for handle, scheduled, computed, count in zip(
            plan.known_handles.tolist(),
            plan.known_scheduled.tolist(),
            plan.known_computed.tolist(),
            plan.new_block_counts.tolist(),
            strict=True,
        ):
            held = self.held[handle]
            held.blocks += plan.new_blocks[at : at + count].tolist()
            at += count
            beyond = computed + scheduled - len(held.ids)
            if beyond > 0 and not held.is_broken and not is_skipped:
                assert scheduled == 1
                assert beyond <= held.left_out, "a token that does not exist is to be run"
                computed -= beyond
            held.left_out = 0
            rows.append((handle, computed, scheduled))
        return rows

    def _write(self, held: Held, position: int, slot: Slot) -> None:
        self.content.setdefault(held.blocks[position // self.block_size], [UNWRITTEN] * self.block_size)[position % self.block_size] = slot

    def _poison(self, handle: int, held: Held, first: int, last: int) -> None:
        """The keys and values of [first, last) are not finite."""
        for position in range(first, last):
            self._write(held, position, GARBAGE)
            self.poisoned[held.blocks[position // self.block_size]] = handle

    def _read(self, handle: int, held: Held, count: int) -> list[Slot]:
        """What the blocks hold for the first `count` tokens; with `strict` it must have been written for this very prefix."""
        blocks = held.blocks[: -(-count // self.block_size)]
        read = [slot for block in blocks for slot in self.content.get(block, [UNWRITTEN] * self.block_size)][:count]
        if self.strict:
            assert read == held.slots[:count], "a block holds another prefix's keys and values"
            assert all(self.poisoned.get(block, handle) == handle for block in blocks), "a block was not zeroed"
        return read


def outcome(
    number: int,
    status: StepStatus,
    handles: list[int],
    counts: list[int],
    tokens: list[int],
    flags: Sequence[int] = (),
    prompt_logprobs: Sequence[tuple[int, int, types_pb2.Logprobs]] = (),
    logprobs: Mapping[int, int] = MappingProxyType({}),
) -> StepOutcome:
    """`logprobs` has the token of each row that gives them; its logprob is the token's number."""
    return StepOutcome(
        number=number,
        status=status,
        handles=handles,
        token_counts=counts,
        token_ids=tokens,
        logprob_rows=list(logprobs),
        logprobs=LogprobArrays(*_arrays_of(list(logprobs.values()))) if logprobs else None,
        prompt_logprobs=list(prompt_logprobs),
        flags=bytes(flags),
    )


def _arrays_of(tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ids = np.array(tokens, dtype=np.int32)
    return np.ones_like(ids), ids, ids.astype(np.float32), np.zeros_like(ids)


def make_scheduler(**settings: object) -> Scheduler:
    return Scheduler(CoreSettings(**{"watermark": 0.0, **settings}), ManualClock())  # type: ignore[arg-type]


def make_replica(
    num_blocks: int = 50,
    *,
    seqs: int = 16,
    tokens: int = 32,
    in_flight: int = 2,
    name: str = "replica",
    block_size: int = BLOCK,
    run_ahead: int = 16,
) -> Replica:
    spec = FullAttentionSpec(block_size=block_size, kv_heads=1, head_size=8, dtype="float32")
    config = configure([("layer", spec)], spec.page_size_bytes * num_blocks, num_blocks)
    return Replica(name, KVCacheCoordinator(config, default_registry()), ReplicaLimits(seqs, tokens, 10_000, in_flight, run_ahead))


def make_spec(
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    children: int = 1,
    deadline: float | None = None,
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    priority: int = 0,
    salt: bytes = b"",
    uid: bytes = bytes(16),
    **sampling: object,
) -> RequestSpec:
    params = types_pb2.SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return RequestSpec(
        uid=uid,
        request_id="",
        prompt=np.array(prompt, dtype=np.int32),
        sampling=params,
        keys=HashKeys(salt=salt),
        num_children=children,
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        read_prefix_cache=True,
        priority=priority,
        deadline=deadline,
    )


@dataclass
class Collected:
    """What the owner of the requests has seen."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    finishes: dict[Request, list[Status]] = field(default_factory=dict)
    cached: dict[Request, int] = field(default_factory=dict)
    logprobs: dict[Request, list[float]] = field(default_factory=dict)
    timed: set[Request] = field(default_factory=set)
    prompts: dict[Request, int] = field(default_factory=dict)  # prompt positions with logprobs so far, the first included

    def take(self, scheduler: Scheduler) -> None:
        for delta in scheduler.take_deltas():
            assert delta.request not in self.finishes, "something came after the finish"
            self.tokens.setdefault(delta.request, []).extend(delta.token_ids)
            if delta.cached_tokens is not None:
                assert delta.request not in self.cached, "cached tokens are reported once"
                self.cached[delta.request] = delta.cached_tokens
            if delta.logprobs is not None:
                assert len(delta.logprobs.counts) == len(delta.token_ids)
                self.logprobs.setdefault(delta.request, []).extend(delta.logprobs.values.tolist())
            if delta.timing is not None:
                assert delta.request not in self.timed, "timing is reported once"
                self.timed.add(delta.request)
            for first, logprobs in delta.prompt_logprobs:
                assert first == self.prompts.get(delta.request, 1), "prompt logprobs come once, without a gap"
                self.prompts[delta.request] = first + len(logprobs.counts) // 4
            if delta.finish is not None:
                self.finishes.setdefault(delta.request, []).append(delta.finish)


def run_until_idle(
    scheduler: Scheduler, replica: Replica, worker: ModelWorker, collected: Collected, *, most: int = 5000
) -> list[StepPlan]:
    """Keep as many steps in flight as allowed until nothing is left to do."""
    waiting: list[StepPlan] = []
    plans = []
    for _ in range(most):
        plan = scheduler.schedule(replica)
        if plan is not None:
            waiting.append(plan)
            plans.append(plan)
            continue
        if not waiting:
            break
        result = worker.run(waiting[0], ends=len(waiting) > 1)
        scheduler.update(replica, result)
        if result.is_last:
            waiting.pop(0)
        collected.take(scheduler)
    else:
        raise AssertionError("it never came to rest")
    collected.take(scheduler)
    return plans
