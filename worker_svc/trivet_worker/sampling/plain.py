"""Sampling written out in numpy, a row at a time: the definition that the native sampler is held to, and what runs without a build.

It sorts whole rows, so it takes milliseconds where the native one takes microseconds. Both give the same tokens, but where a nucleus'
edge lies within rounding of `top_p`.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.cpu.sampling import PHASE_CHOOSE, PHASE_CONSTRAIN, PHASE_SCALE, SamplingColumnArrays, SamplingRows

from trivet_worker.sampling.logprobs import FLOOR
from trivet_worker.sampling.noise import gumbel, natural_log, row_keys
from trivet_worker.sampling.params import Constraints

NEVER = np.float32(-np.inf)
FLAG_NON_FINITE, FLAG_ALL_MASKED = 1, 2
Row = NDArray[np.float32]


class PlainSampler:
    """As `NativeSampler`; `constraints_of` finds what a slot's request brings, since here no addresses are read."""

    def __init__(self, constraints_of: Callable[[int], Constraints | None]) -> None:
        self._constraints_of = constraints_of

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
    ) -> None:
        """Some phases of the order on float32 logits `[R, V]`, in place; `tokens`, `flags` and `shifts` `[R]` are written."""
        for index, slot in enumerate(rows.slots.tolist()):
            row: Row = logits[index].numpy()
            ids = rows.token_ids[slot, : rows.lengths[index]]
            prompt, output = ids[: rows.prompt_lengths[index]], ids[rows.prompt_lengths[index] :]
            if phases & PHASE_CONSTRAIN:
                best = row.max()
                flags[index] = 0 if np.isfinite(best) else FLAG_NON_FINITE  # single −inf are a model's own masks
                constraints = self._constraints_of(slot)
                if constraints is not None and flags[index] == 0:
                    _constrain(row, constraints, output, int(columns.min_tokens[slot]))
            flags[index] = flags[index] or _flag_of(row)
            if phases & PHASE_SCALE and flags[index] == 0:
                _penalise(row, prompt, output, columns.repetition[slot], columns.frequency[slot], columns.presence[slot])
                flags[index] = _flag_of(row)
                if flags[index] == 0:
                    shifts[index] = _scale(row, columns.temperature[slot], columns.min_p[slot])
            tokens[index] = 0
            if phases & PHASE_CHOOSE and flags[index] == 0:
                position = rows.lengths[index : index + 1]
                tokens[index] = _choose(row, columns, slot, position, keeps_filtered=keeps_filtered)

    def pick(
        self,
        scores: torch.Tensor,
        chosen: NDArray[np.int64],
        widths: NDArray[np.int32],
        wanted: NDArray[np.int32],
        is_wanted: NDArray[np.uint8],
        is_plain: NDArray[np.uint8],
        shift: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """Ids and values, ragged, `widths + 1` a row, and the chosen ids' ranks `[R]`, of float32 scores `[R, V]`."""
        ids, values, ranks = [], [], np.empty(len(widths), dtype=np.int32)
        at = 0
        for index, width in enumerate(widths.tolist()):
            row = scores[index].numpy()
            ranks[index] = (row > row[chosen[index]]).sum() + 1
            if is_wanted[index]:
                others = wanted[at : at + width].astype(np.int64)
                at += width
            else:
                others = np.argsort(-row, kind="stable")[:width]
            ids.append(np.concatenate([chosen[index : index + 1], others]))
            values.append(_plain_values(row, shift[index])[ids[-1]] if is_plain[index] else _log_probabilities(row)[ids[-1]])
        return np.concatenate(ids).astype(np.int32), np.concatenate(values).astype(np.float32), ranks


def _flag_of(row: Row) -> int:
    best = row.max()
    return 0 if np.isfinite(best) else FLAG_ALL_MASKED if best == NEVER else FLAG_NON_FINITE


def _constrain(row: Row, given: Constraints, output: NDArray[np.int32], min_tokens: int) -> None:
    if given.allowed is not None:
        kept = row[given.allowed]
        row[:] = NEVER
        row[given.allowed] = kept
    for word in given.words:
        before = len(word) - 1  # a word that began in the prompt is not the model's
        if before <= len(output) and np.array_equal(output[len(output) - before :], word[:-1]):
            row[word[-1]] = NEVER
    if len(output) < min_tokens:
        row[given.end_ids] = NEVER
    row[given.bias_ids] += given.bias_values


def _penalise(
    row: Row, prompt: NDArray[np.int32], output: NDArray[np.int32], repetition: np.float32, frequency: np.float32, presence: np.float32
) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    if repetition != 1.0:
        seen = np.union1d(prompt, output)
        with np.errstate(divide="ignore", invalid="ignore"):
            row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    ids, counts = np.unique(output, return_counts=True)
    row[ids] = row[ids] - frequency * counts.astype(np.float32) - presence


def _scale(row: Row, temperature: np.float32, min_p: np.float32) -> np.float32:
    """Temperature and min-p of a random row; the best score is 0 from here on, so that no temperature can overflow."""
    if temperature <= 0:
        return np.float32(0)
    best = row.max()
    row -= best
    row /= temperature
    if min_p > 0:
        row[row < np.float32(natural_log(np.array([min_p], dtype=np.float64))[0])] = NEVER
    return np.float32(best / temperature)


def _choose(row: Row, columns: SamplingColumnArrays, slot: int, position: NDArray[np.int64], *, keeps_filtered: bool) -> int:
    if columns.temperature[slot] <= 0:
        return int(row.argmax())
    kept = _filtered(row, int(columns.top_k[slot]), float(columns.top_p[slot]))
    key = row_keys(columns.seeds[slot : slot + 1], position)
    noisy = row[kept].astype(np.float64) + gumbel(key, kept)
    token = int(kept[np.flatnonzero(noisy == noisy.max())].min())
    if keeps_filtered:
        row[np.setdiff1d(np.arange(len(row)), kept)] = NEVER
    return token


def _filtered(row: Row, top_k: int, top_p: float) -> NDArray[np.int64]:
    """Ids that top-k, then top-p leave. Of equal scores the lowest id goes first."""
    if not 0 < top_k < len(row) and top_p >= 1.0:
        return np.arange(len(row))
    order: NDArray[np.int64] = np.argsort(-row, kind="stable")[: top_k or None]
    order = order[row[order] > NEVER]
    if top_p >= 1.0:
        return order
    masses = np.exp(row[order].astype(np.float64) - float(row[order[0]]))
    # The smallest set whose probability reaches top_p: a token stays when those before it do not reach it yet.
    before = np.cumsum(masses) - masses
    is_kept = before < top_p * masses.sum()
    is_kept[0] = True
    kept: NDArray[np.int64] = order[is_kept]
    return kept


def _plain_values(row: Row, shift: np.float32) -> Row:
    values = row + shift
    return np.where(np.isfinite(values), values, np.float32(FLOOR))


def _log_probabilities(row: Row) -> NDArray[np.float64]:
    """Log-softmax in float64, with a floor."""
    best = float(row.max())
    if not np.isfinite(best):
        return np.full(len(row), FLOOR)
    shifted = row.astype(np.float64) - best
    values: NDArray[np.float64] = np.maximum(shifted - np.log(np.exp(shifted).sum()), FLOOR)
    return values
