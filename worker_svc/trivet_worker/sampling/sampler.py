"""One token per row, in this order, which is part of the meaning:

raw snapshot for logprobs → float32 → allowed tokens → bad words → min tokens, logit bias, processors that can change the argmax → penalties
→ temperature → min-p, processors that cannot change it → top-k, top-p → noise and argmax → processed snapshot. Greedy and random rows go
together; a temperature below 1e-5 is greedy: such a row is neither scaled nor filtered. A row whose logits are not finite, or whose masks
leave nothing, gives no token and a flag: that request ends alone. Of equal scores the lowest id goes first.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.cpu.library import NotBuilt
from trivet_kernels.cpu.sampling import PHASE_CHOOSE, PHASE_CONSTRAIN, PHASE_SCALE, NativeSampler, SamplingColumnArrays, SamplingRows

from trivet_worker.sampling.logprobs import LOGITS, PROCESSED, TokenLogprobs
from trivet_worker.sampling.params import NO_IDS, SamplingColumns
from trivet_worker.sampling.plain import PlainSampler
from trivet_worker.sampling.processors import ActiveProcessors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Row i is the i-th row that was sampled. A flagged row's token is meaningless."""

    tokens: NDArray[np.int64]
    flags: NDArray[np.uint8]
    logprob_rows: NDArray[np.int64]
    logprobs: TokenLogprobs | None  # over logprob_rows


class SamplingOperators(Protocol):
    """What the native sampler and the written-out one have in common."""

    def run(
        self,
        logits: torch.Tensor,
        columns: SamplingColumnArrays,
        rows: SamplingRows,
        tokens: NDArray[np.int64],
        flags: NDArray[np.uint8],
        shifts: NDArray[np.float32],
        *,
        phases: int,
        keeps_filtered: bool,
    ) -> None: ...

    def pick(
        self,
        scores: torch.Tensor,
        chosen: NDArray[np.int64],
        widths: NDArray[np.int32],
        wanted: NDArray[np.int32],
        is_wanted: NDArray[np.uint8],
        is_plain: NDArray[np.uint8],
        shift: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]: ...


def choose_operators(columns: SamplingColumns, vocab_size: int, threads: int) -> SamplingOperators:
    """Native ones, or where there is no build of them the ones written out in numpy."""
    try:
        return NativeSampler(vocab_size, threads)
    except NotBuilt as reason:
        logger.warning("sampling runs in numpy, which is slow: %s", reason)
        return PlainSampler(columns.constraints.get)


class Sampler:
    """Samples the rows of steps. Owns the requests' columns, the operators and the custom processors."""

    def __init__(self, columns: SamplingColumns, operators: SamplingOperators, processors: ActiveProcessors) -> None:
        self._columns = columns
        self._operators = operators
        self._processors = processors

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        """Float32 logits `[R, V]`, changed in place. `rows.lengths` are also the positions of the tokens to come."""
        columns, count = self._columns, len(rows.slots)
        wants = np.flatnonzero(columns.logprobs[rows.slots] >= 0)
        modes = columns.logprobs_mode[rows.slots[wants]]
        is_processed = np.isin(modes, PROCESSED)
        scores = torch.empty((len(wants), logits.shape[1] if len(wants) else 0))
        _copy_rows(scores, logits, wants, np.flatnonzero(~is_processed))
        tokens, flags, shifts = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.float32)

        def run(phases: int) -> None:
            keeps = bool(is_processed.any())
            self._operators.run(logits, columns.arrays, rows, tokens, flags, shifts, phases=phases, keeps_filtered=keeps)

        if self._processors.act_on(rows.slots):
            run(PHASE_CONSTRAIN)
            self._processors.apply(logits, rows, flags, is_argmax_invariant=False)
            run(PHASE_SCALE)
            self._processors.apply(logits, rows, flags, is_argmax_invariant=True)
            run(PHASE_CHOOSE)
        else:
            run(PHASE_CONSTRAIN | PHASE_SCALE | PHASE_CHOOSE)
        if not len(wants):
            return Sampled(tokens, flags, wants, None)
        _copy_rows(scores, logits, wants, np.flatnonzero(is_processed))
        shift = np.where(is_processed, shifts[wants], np.float32(0)).astype(np.float32)
        return Sampled(tokens, flags, wants, self._pick(scores, tokens[wants], rows.slots[wants], shift))

    def prompt_logprobs(self, logits: torch.Tensor, targets: NDArray[np.int32], slot: int, top: int) -> TokenLogprobs:
        """Of a prompt's own tokens, out of the logits `[R, V]` of the positions before them, which nothing processes."""
        count = len(targets)
        is_plain = np.full(count, self._columns.logprobs_mode[slot] in LOGITS, dtype=np.uint8)
        widths, none = np.full(count, min(top, logits.shape[1]), dtype=np.int32), np.zeros(count, dtype=np.uint8)
        picked = self._operators.pick(
            logits.contiguous(), targets.astype(np.int64), widths, NO_IDS, none, is_plain, np.zeros(count, dtype=np.float32)
        )
        return TokenLogprobs(widths + 1, *picked)

    def _pick(self, scores: torch.Tensor, chosen: NDArray[np.int64], slots: NDArray[np.int64], shift: NDArray[np.float32]) -> TokenLogprobs:
        columns = self._columns
        widths, is_wanted = columns.logprobs[slots], columns.has_logprob_ids[slots]
        wanted = np.concatenate([columns.logprob_ids[slot] for slot in slots[is_wanted].tolist()]) if is_wanted.any() else NO_IDS
        is_plain = np.isin(columns.logprobs_mode[slots], LOGITS)
        picked = self._operators.pick(scores, chosen, widths, wanted, is_wanted.astype(np.uint8), is_plain.astype(np.uint8), shift)
        return TokenLogprobs(widths + 1, *picked)


def _copy_rows(scores: torch.Tensor, logits: torch.Tensor, wants: NDArray[np.int64], at: NDArray[np.int64]) -> None:
    if at.size:
        scores.numpy()[at] = logits.numpy()[wants[at]]
