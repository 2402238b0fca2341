"""Runs steps on a model, strictly in order.

A step of decodes may be run several times over (`run_ahead`): `execute` runs it once, `go_on` once more, with the tokens sampled before.
Each iteration has a result of its own; no more come once a token ends a request, as far as that is known here, or there is news.

A step is checked before anything of it is applied. It then succeeds or fails as a whole: its bookkeeping (finished, new requests, new
blocks, blocks zeroed) holds whatever its status; what a failed or skipped step does not do is write keys and values that count, and sample.
After a failure every step is skipped until one says `resync`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.api import Operators
from trivet_kernels.cpu.sampling import SamplingRows
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u32
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_worker.attention.caches import allocate_caches, copy_blocks, zero_blocks
from trivet_worker.forward_context import ForwardContext, forward_context
from trivet_worker.models.model import Model
from trivet_worker.runner.batch import PersistentBatch, as_index
from trivet_worker.runner.inputs import ModelInputs, Rows, build_inputs
from trivet_worker.runner.limits import RunnerLimits
from trivet_worker.runner.replies import logprobs_message, put_failure, put_sampled
from trivet_worker.runner.steady import SteadyDecodes
from trivet_worker.runner.step_check import CheckedStep, check_step
from trivet_worker.sampling.processors import ActiveProcessors, LogitsProcessor
from trivet_worker.sampling.sampler import Sampled, Sampler, choose_operators

NO_BLOCKS = np.zeros(0, dtype=np.int64)
PROMPT_LOGITS_ROWS = 32  # logits of so many prompt positions at a time: 6 MB for a vocabulary of 49 152, and several times that beside them


@dataclass(frozen=True, slots=True)
class StepAtHand:
    """A step that is checked and applied, and which of its iterations is due."""

    epoch: types_pb2.Epoch
    number: int
    rows: Rows
    copy_sources: NDArray[np.int64]
    copy_targets: NDArray[np.int64]
    iterations: int  # at most
    iteration: int = 0

    def following(self) -> "StepAtHand":
        """The same decodes, a token further."""
        rows = replace(self.rows, computed=self.rows.computed + 1)
        return replace(self, rows=rows, copy_sources=NO_BLOCKS, copy_targets=NO_BLOCKS, iteration=self.iteration + 1)


def no_news() -> bool:
    return False


class ModelRunner:
    """Owns the model, the persistent batch and the KV caches. Not safe for threads: one thread runs steps."""

    def __init__(
        self,
        model: Model,
        operators: Operators,
        limits: RunnerLimits,
        load: Callable[[], Model] | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """`load` brings the model back after a sleep that dropped its weights; without it such a sleep is refused."""
        self._resident: Model | None = model
        self._load = load
        self._operators = operators
        self._limits = limits
        self._caches: dict[str, torch.Tensor] = {}
        self._num_blocks = 0
        self._config: types_pb2.KvCacheConfig | None = None
        self._failed_step: int | None = None
        self._at_hand: StepAtHand | None = None
        active = ActiveProcessors(processors, limits.max_num_seqs)
        self._steady: SteadyDecodes | None = None
        self._batch = PersistentBatch(
            capacity=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            vocab_size=model.vocab_size,
            processors=active,
        )
        columns = self._batch.sampling
        self._sampler = Sampler(columns, choose_operators(columns, model.vocab_size, torch.get_num_threads()), active)

    def warm_up(self, num_tokens: int = 16) -> None:
        """One forward without a cache: threads and buffers of the libraries come up now, not in the first request."""
        # Beyond the context there are no rotary angles, beyond a step's tokens no buffers.
        num_tokens = min(num_tokens, self._limits.max_model_len, self._limits.max_num_batched_tokens)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        with torch.inference_mode(), forward_context(ForwardContext(self._operators, None, {})):
            self._model.step(ids, torch.arange(num_tokens), torch.tensor([num_tokens - 1]), wants_hidden=False)

    def configure(self, config: types_pb2.KvCacheConfig) -> None:
        """Make room for the KV cache; an epoch begins with an empty pool.

        New memory even for the same size: what was poisoned, and not yet zeroed when the epoch before ended, must not be read in this one.
        """
        self._batch.clear()
        self._failed_step = self._at_hand = self._steady = None
        self._caches = {}  # before the new ones come, so that there are never two
        self._num_blocks = config.num_blocks
        self._config = config
        self.wake_up()

    @property
    def is_whole_step(self) -> bool:
        """Whether a step is one native call, which allocates nothing large."""
        return self._model.is_whole_step

    @property
    def _model(self) -> Model:
        assert self._resident is not None, "a step or a warm-up in a sleep"
        return self._resident

    # ---- sleep ----

    @property
    def is_asleep(self) -> bool:
        return self._config is not None and not self._caches

    def sleep(self, level: int) -> None:
        """Give back the memory of the KV cache (level 1), and of the weights (level 2). Raises UNIMPLEMENTED."""
        if level > 1 and self._load is None:
            raise TrivetError(ErrorKind.UNIMPLEMENTED, f"level {level}: this worker cannot load its weights again")
        self._batch.clear()
        self._steady = None
        self._caches = {}
        if level > 1:
            self._resident = None

    def wake_up(self) -> None:
        """Weights and an empty KV cache, as they were configured; what is there stays."""
        if self._resident is None:
            assert self._load is not None, "sleep refused to drop the weights"
            self._resident = self._load()
            self.warm_up()
        if not self._caches and self._config is not None:
            self._caches = allocate_caches(self._config, self._model.layer_caches(), self._limits.block_size)

    @property
    def kv_cache_bytes(self) -> int:
        """What the KV caches may take; pages that were never written take nothing yet."""
        return sum(cache.numel() * cache.element_size() for cache in self._caches.values())

    @torch.inference_mode()
    def execute(self, step: worker_pb2.Step, has_news: Callable[[], bool] = no_news) -> worker_pb2.StepResult:
        """A failure of the computation is its result. Raises for a step that can't be applied: no later one of the epoch can be trusted.

        `has_news` says that another step waits, so that this one is not to go on.
        """
        started = time.perf_counter()
        if self.is_asleep:
            raise TrivetError(ErrorKind.ABORTED, "a step came while this worker sleeps")
        is_skipped = self._failed_step is not None and not (step.HasField("resync") and step.resync == self._failed_step)
        steady = None if self._steady is None else self._steady.take(step, self._num_blocks)
        if steady is not None:
            at_hand = StepAtHand(step.epoch, step.step, steady, NO_BLOCKS, NO_BLOCKS, max(1, step.run_ahead))
            return self._iterate(at_hand, has_news, started)
        self._steady = None
        checked = check_step(step, self._batch, self._limits, num_blocks=self._num_blocks, is_skipped=is_skipped)
        rows = self._update_states(checked)
        if is_skipped:
            return worker_pb2.StepResult(epoch=step.epoch, step=step.step, status=worker_pb2.STEP_STATUS_SKIPPED, last_iteration=True)
        self._failed_step = None
        at_hand = StepAtHand(step.epoch, step.step, rows, checked.copy_sources, checked.copy_targets, checked.iterations)
        return self._iterate(at_hand, has_news, started)

    @torch.inference_mode()
    def go_on(self, has_news: Callable[[], bool] = no_news) -> worker_pb2.StepResult:
        """The next iteration of the step whose last result was not its last."""
        assert self._at_hand is not None, "a step goes on"
        return self._iterate(self._at_hand.following(), has_news, time.perf_counter())

    def _iterate(self, step: StepAtHand, has_news: Callable[[], bool], started: float) -> worker_pb2.StepResult:
        result = worker_pb2.StepResult(epoch=step.epoch, step=step.number, iteration=step.iteration, last_iteration=True)
        try:
            may_go_on = self._run(step, result, started)
        except Exception as error:  # what it held is freed with its frames, when this block is left
            self._failed_step, self._at_hand, self._steady = step.number, None, None
            put_failure(result, error)
            return result
        left = step.iterations - 1 - step.iteration
        if left and may_go_on and not has_news():
            result.last_iteration = False
            self._at_hand = step
            return result
        self._batch.left_out[step.rows.slots] = left
        self._at_hand = None
        return result

    # ---- update states ----

    def _update_states(self, step: CheckedStep) -> Rows:
        batch = self._batch
        for handle in step.finished:
            batch.remove(handle)
        if step.blocks_to_zero.size:  # said once, so a step that is skipped does it too
            zero_blocks(self._caches, as_index(step.blocks_to_zero))
        new_slots = [batch.add(work) for work in step.new]
        for slot, blocks in step.new_blocks:
            batch.append_blocks(slot, blocks)
        batch.left_out[step.known_slots] = 0
        new_handles = np.array([work.message.handle for work in step.new], dtype=np.uint32)
        return Rows(
            handles=np.concatenate([new_handles, step.known_handles]),
            slots=np.array(new_slots + step.known_slots, dtype=np.int64),
            computed=step.computed,
            scheduled=step.scheduled,
        )

    # ---- inputs, forward, sample, reply ----

    def _run(self, step: StepAtHand, result: worker_pb2.StepResult, started: float) -> bool:
        """Whether its rows can all go on: each has a token, and none that ends it."""
        rows = step.rows
        if step.copy_sources.size:
            copy_blocks(self._caches, as_index(step.copy_sources), as_index(step.copy_targets))
        result.handles, result.token_counts = pack_u32(rows.handles), pack_i32(np.zeros(len(rows.handles), dtype=np.int32))
        result.status = worker_pb2.STEP_STATUS_DONE
        if not rows.handles.size:
            return False  # only news of finished requests, or a beat without work
        self._steady = self._steady or SteadyDecodes.of(rows, self._batch)
        steady = self._steady
        inputs = build_inputs(rows, self._batch) if steady is None else steady.inputs(rows)
        prepared = time.perf_counter()
        with forward_context(ForwardContext(self._operators, inputs.batch, self._caches)):
            sampling = self._sampling_rows(rows) if steady is None else steady.everyone
            reports = steady is None and bool((self._batch.prompt_logprobs[rows.slots] >= 0).any())
            sampled_tokens = as_index(inputs.last_tokens[sampling])
            output = self._model.step(inputs.token_ids, inputs.positions, sampled_tokens, wants_hidden=reports)
            if output.hidden is not None:
                self._report_prompts(rows, inputs, output.hidden, result)
        computed = time.perf_counter()
        sampled = self._sample(output.logits, rows.slots[sampling]) if sampling.size else None
        if sampled is not None:
            put_sampled(result, len(rows.slots), sampling, sampled)
            self._feed_back(rows.slots[sampling], sampled)
        done = time.perf_counter()
        timing = result.timing
        timing.input_us, timing.forward_us = _microseconds(prepared - started), _microseconds(computed - prepared)
        timing.sample_us, timing.total_us = _microseconds(done - computed), _microseconds(done - started)
        result.stats.num_requests, result.stats.num_tokens = len(rows.slots), rows.num_tokens
        return sampled is not None and not sampled.flags.any() and not self._ends_any(rows.slots[sampling], sampled.tokens)

    def _ends_any(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> bool:
        stop_ids = self._batch.stop_ids
        return any(token in stop_ids[slot] for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True))

    def _sampling_rows(self, rows: Rows) -> NDArray[np.int64]:
        """Rows that reach their last token in this step."""
        reached = rows.computed + rows.scheduled >= self._batch.num_tokens[rows.slots]
        return np.flatnonzero(reached & self._batch.samples[rows.slots])

    def _sample(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> Sampled:
        batch = self._batch
        return self._sampler.sample(logits, SamplingRows(slots, batch.num_tokens[slots], batch.num_prompt[slots], batch.token_ids))

    def _feed_back(self, slots: NDArray[np.int64], sampled: Sampled) -> None:
        """The next step finds its tokens here without having been told. Last of all, so that a step that fails leaves nothing behind."""
        batch, good = self._batch, sampled.flags == 0
        batch.is_broken[slots[~good]] = True
        slots, tokens = slots[good], sampled.tokens[good]
        batch.token_ids[slots, batch.num_tokens[slots]] = tokens
        batch.num_tokens[slots] += 1

    def _report_prompts(self, rows: Rows, inputs: ModelInputs, hidden: torch.Tensor, result: worker_pb2.StepResult) -> None:
        """Logprobs of prompt tokens whose predecessor ran in this step and that were not reported before."""
        batch = self._batch
        for row in np.flatnonzero(batch.prompt_logprobs[rows.slots] >= 0).tolist():
            slot, computed = int(rows.slots[row]), int(rows.computed[row])
            first = max(computed + 1, int(batch.prompt_logprobs_from[slot]))
            last = min(computed + int(rows.scheduled[row]), int(batch.num_prompt[slot]) - 1)  # inclusive: position of the last target
            for begin in range(first, last + 1, PROMPT_LOGITS_ROWS):
                end = min(begin + PROMPT_LOGITS_ROWS, last + 1)
                offset = int(inputs.starts[row]) - computed - 1
                logits = self._model.logits(hidden[begin + offset : end + offset])
                targets = batch.token_ids[slot, begin:end]
                picked = self._sampler.prompt_logprobs(logits, targets, slot, int(batch.prompt_logprobs[slot]))
                result.prompt_logprobs.append(
                    worker_pb2.PromptLogprobChunk(handle=int(rows.handles[row]), first_position=begin, logprobs=logprobs_message(picked))
                )


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
