"""One token per row, in this order, which is part of the meaning:

raw snapshot for logprobs → float32 → allowed tokens → bad words → min tokens, logit bias → penalties → temperature → min-p → top-k, top-p →
noise and argmax. Greedy and random rows go together; a temperature below 1e-5 is greedy. A row whose logits are not finite, or whose masks
leave nothing, gives no token and a flag: that request ends alone. Of equal scores the lowest id goes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_proto.v1 import types_pb2

from trivet_worker.sampling.logprobs import TokenLogprobs, finite_log_softmax, pick_logprobs
from trivet_worker.sampling.noise import gumbel, row_keys
from trivet_worker.sampling.params import Extras, SamplingColumns

NEVER = float("-inf")
FEW, WIDER = 512, 8
NOISY_ROWS = 2  # rows of the whole vocabulary that get noise at a time: more leave the cache, and take twice as long a row
FLAG_NON_FINITE, FLAG_ALL_MASKED = 1, 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """Row i is the i-th row that was sampled. A flagged row's token is meaningless."""

    tokens: NDArray[np.int64]
    flags: NDArray[np.uint8]
    logprob_rows: NDArray[np.int64]
    logprobs: TokenLogprobs | None  # over logprob_rows


def sample(
    logits: torch.Tensor,
    columns: SamplingColumns,
    slots: NDArray[np.int64],
    lengths: NDArray[np.int64],
    prompt_lengths: NDArray[np.int64],
    token_ids: NDArray[np.int32],
) -> Sampled:
    """float32 logits `[R, V]`, changed in place.

    `lengths` are tokens so far, so also the positions of the tokens to come; `token_ids[slot]` holds a request's ids.
    """
    best = logits.amax(dim=1).numpy()  # NaN where the row holds one
    flags = np.where(np.isfinite(best), 0, FLAG_NON_FINITE).astype(np.uint8)  # single −inf are a model's own masks
    wants = np.flatnonzero(columns.logprobs[slots] >= 0)
    scores = torch.empty((wants.size, logits.shape[1] if wants.size else 0))
    _snapshot(scores, logits, wants, columns.logprobs_mode[slots[wants]], processed=False)
    special = [(row, columns.extras[slot]) for row, slot in enumerate(slots.tolist()) if slot in columns.extras]
    for row, extras in special:
        slot = slots[row]
        _mask_and_bias(logits[row], extras, token_ids[slot, : lengths[row]], int(lengths[row] - prompt_lengths[row]), columns, slot)
    if special:
        best = logits.amax(dim=1).numpy()
        flags[(flags == 0) & (best == NEVER)] = FLAG_ALL_MASKED
        flags[(flags == 0) & ~np.isfinite(best)] = FLAG_NON_FINITE
    tokens = logits.numpy().argmax(axis=1)  # a tenth of torch's time
    random = np.flatnonzero((columns.temperature[slots] > 0) & (flags == 0))
    if random.size:
        tokens[random] = _sample_random(logits, columns, slots, lengths, random)
    logprobs = None
    if wants.size:
        _snapshot(scores, logits, wants, columns.logprobs_mode[slots[wants]], processed=True)
        logprobs = pick_logprobs(scores, torch.from_numpy(tokens[wants]), columns.logprobs[slots[wants]])
    return Sampled(tokens, flags, wants, logprobs)


_PROCESSED = (types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS)
_LOGITS = (types_pb2.LOGPROBS_MODE_RAW_LOGITS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS)


def _snapshot(scores: torch.Tensor, logits: torch.Tensor, wants: NDArray[np.int64], modes: NDArray[np.int32], *, processed: bool) -> None:
    """Fill the rows of `scores` whose mode reads this point of the order: raw, or processed by masks, biases and penalties."""
    at = np.flatnonzero(np.isin(modes, _PROCESSED) == processed)
    if not at.size:
        return
    chosen = logits[torch.from_numpy(wants[at])]
    plain = torch.from_numpy(np.isin(modes[at], _LOGITS))[:, None]
    normalised = finite_log_softmax(chosen)
    scores[torch.from_numpy(at)] = torch.where(plain, chosen, normalised) if bool(plain.any()) else normalised


def _mask_and_bias(row: torch.Tensor, extras: Extras, ids: NDArray[np.int32], num_output: int, columns: SamplingColumns, slot: int) -> None:
    if extras.allowed is not None:
        row.masked_fill_(extras.allowed, NEVER)
    for word in extras.bad_words:
        if _precedes(ids, word[:-1], num_output):
            row[int(word[-1])] = NEVER
    if extras.end_ids is not None and num_output < columns.min_tokens[slot]:
        row[extras.end_ids] = NEVER
    if extras.bias_ids is not None and extras.bias_values is not None:
        row[extras.bias_ids] += extras.bias_values
    if extras.counts is not None:
        _penalise(row, extras, columns, slot)


def _precedes(ids: NDArray[np.int32], word: NDArray[np.int32], num_output: int) -> bool:
    """Whether the output so far ends with these ids; a word that began in the prompt is not the model's."""
    return len(word) <= num_output and (len(word) == 0 or bool(np.array_equal(ids[len(ids) - len(word) :], word)))


def _penalise(row: torch.Tensor, extras: Extras, columns: SamplingColumns, slot: int) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    counts = extras.counts
    assert counts is not None
    appeared = counts.in_output > 0
    repetition = float(columns.repetition[slot])
    if repetition != 1.0:
        seen = counts.in_prompt | appeared
        row.copy_(torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row))
    row -= float(columns.frequency[slot]) * counts.in_output
    row -= float(columns.presence[slot]) * appeared


def _sample_random(
    logits: torch.Tensor, columns: SamplingColumns, slots: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Temperature, filters, noise. The maximum is taken off first, so that no temperature can overflow."""
    chosen = slots[rows]
    scores = logits[torch.from_numpy(rows)]
    scores -= scores.amax(dim=1, keepdim=True)
    scores /= torch.from_numpy(columns.temperature[chosen])[:, None]
    min_p = columns.min_p[chosen]
    if min_p.any():
        with np.errstate(divide="ignore"):
            least = np.log(min_p)  # the best has score 0
        scores.masked_fill_(scores < torch.from_numpy(least)[:, None], NEVER)
    keys = row_keys(columns.seeds[chosen], lengths[rows])
    top_k, top_p = columns.top_k[chosen].astype(np.int64), columns.top_p[chosen].astype(np.float64)
    filtered = (top_k > 0) | (top_p < 1.0)
    tokens = np.empty(len(rows), dtype=np.int64)
    every = np.arange(scores.shape[1])[None]
    plain = np.flatnonzero(~filtered)
    for first in range(0, plain.size, NOISY_ROWS):
        at = plain[first : first + NOISY_ROWS]
        tokens[at] = _pick(scores[torch.from_numpy(at)], every, keys[at])
    at, width = np.flatnonzero(filtered), min(FEW, scores.shape[1])
    while at.size:
        kept, ids, whole = _narrow(scores[torch.from_numpy(at)], top_k[at], top_p[at], width)
        tokens[at] = _pick(kept, ids, keys[at])
        at, width = at[~whole], min(WIDER * width, scores.shape[1])
    return tokens


def _pick(scores: torch.Tensor, ids: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Argmax of scores `[R, W]` plus noise; `ids` `[R or 1, W]` name the columns."""
    noisy = scores.numpy().astype(np.float64) + gumbel(keys[:, None], ids)
    best = noisy.argmax(axis=1)
    picked: NDArray[np.int64] = np.broadcast_to(ids, noisy.shape)[np.arange(len(best)), best]
    return picked


def _narrow(
    scores: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], width: int
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.bool_]]:
    """Top-k, then top-p, looking at the `width` best of each row `[R, V]`: scores and ids `[R, width]`, and which rows that was enough for.

    Sorting a whole vocabulary takes milliseconds a row; a few hundred hold nearly every nucleus.
    """
    kept, ids = _best(scores, width)
    count = torch.from_numpy(np.where(top_k > 0, top_k, scores.shape[1]))[:, None]
    within = count <= width
    ranks = torch.arange(width)[None]
    kept = kept.masked_fill(ranks >= count, NEVER)
    wide = kept.double()
    total = torch.logsumexp(wide, dim=1, keepdim=True)
    if not bool(within.all()):
        total = torch.where(within, total, torch.logsumexp(scores.double(), dim=1, keepdim=True))
    shares = (wide - total).exp()
    reached = shares.cumsum(dim=1)
    # The smallest set whose probability reaches top_p: a token stays when those before it do not reach it yet.
    limit = torch.from_numpy(np.where(top_p < 1.0, top_p, np.inf))[:, None]
    kept = kept.masked_fill((reached - shares >= limit) & (ranks > 0), NEVER)
    # A top-k beyond the width changes the total too, so only rows without one can end here.
    unlimited = count == scores.shape[1]
    whole = within | (unlimited & (reached[:, -1:] >= limit))
    return kept, ids, whole[:, 0].numpy()


def _best(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """The `width` highest of each row, in order, of equals the lowest id first. torch.topk leaves that open and is slower."""
    values = scores.numpy()
    beyond = values.shape[1] - width
    ids = np.sort(np.argpartition(values, beyond, axis=1)[:, beyond:], axis=1) if beyond else np.tile(np.arange(width), (len(values), 1))
    order = np.argsort(-np.take_along_axis(values, ids, axis=1), axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    return torch.from_numpy(np.take_along_axis(values, ids, axis=1)), ids


def prompt_logprobs(scores: torch.Tensor, targets: Sequence[int], top: int) -> TokenLogprobs:
    """Logprobs of the prompt's own tokens out of the logits `[R, V]` of the positions before them."""
    return pick_logprobs(finite_log_softmax(scores), torch.tensor(list(targets)), np.full(len(targets), top, dtype=np.int32))
