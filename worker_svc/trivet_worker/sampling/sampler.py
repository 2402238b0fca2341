"""One token per row, in this order, which is part of the meaning:

raw snapshot for logprobs → float32 → allowed tokens → bad words → min tokens, logit bias → penalties → temperature → min-p → top-k, top-p →
noise and argmax. Greedy and random rows go together; a temperature below 1e-5 is greedy. A row whose logits are not finite, or whose masks
leave nothing, gives no token and a flag: that request ends alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_proto.v1 import types_pb2

from trivet_worker.sampling.logprobs import TokenLogprobs, finite_log_softmax, join_logprobs, pick_logprobs
from trivet_worker.sampling.noise import gumbel, row_keys
from trivet_worker.sampling.params import Extras, SamplingColumns

NEVER = float("-inf")
FEW = 512
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
    flags = _non_finite(logits)
    wants = np.flatnonzero(columns.logprobs[slots] >= 0)
    raw = _snapshot(logits, columns, slots, wants, processed=False)
    special = [(row, columns.extras[slot]) for row, slot in enumerate(slots.tolist()) if slot in columns.extras]
    for row, extras in special:
        slot = slots[row]
        _mask_and_bias(logits[row], extras, token_ids[slot, : lengths[row]], int(lengths[row] - prompt_lengths[row]), columns, slot)
    flags |= np.where((logits.amax(dim=1) == NEVER).numpy() & (flags == 0), FLAG_ALL_MASKED, 0).astype(np.uint8)
    tokens = logits.argmax(dim=1).numpy()
    random = np.flatnonzero((columns.temperature[slots] > 0) & (flags == 0))
    if random.size:
        tokens = tokens.copy()
        tokens[random] = _sample_random(logits, columns, slots, lengths, random)
    logprobs = None
    if wants.size:
        raw.update(_snapshot(logits, columns, slots, wants, processed=True))
        logprobs = join_logprobs(
            [pick_logprobs(raw[row][None], _one(tokens[row]), [int(columns.logprobs[slots[row]])]) for row in wants.tolist()]
        )
    return Sampled(tokens, flags, wants, logprobs)


def _non_finite(logits: torch.Tensor) -> NDArray[np.uint8]:
    """NaN or plus infinity anywhere in a row shows in its sum; minus infinity alone may be a model's own mask."""
    broken = torch.isnan(logits).any(dim=1) | (logits == float("inf")).any(dim=1) | (logits.amax(dim=1) == NEVER)
    return broken.numpy().astype(np.uint8) * FLAG_NON_FINITE


def _one(token: int) -> torch.Tensor:
    return torch.tensor([int(token)])


_PROCESSED = {types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS}
_LOGITS = {types_pb2.LOGPROBS_MODE_RAW_LOGITS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS}


def _snapshot(
    logits: torch.Tensor, columns: SamplingColumns, slots: NDArray[np.int64], wants: NDArray[np.int64], *, processed: bool
) -> dict[int, torch.Tensor]:
    """Scores by row for those who want them at this point of the order."""
    rows = [int(row) for row in wants if (int(columns.logprobs_mode[slots[row]]) in _PROCESSED) is processed]
    if not rows:
        return {}
    chosen = logits[rows]
    normalised = finite_log_softmax(chosen)
    return {
        row: chosen[index].clone() if int(columns.logprobs_mode[slots[row]]) in _LOGITS else normalised[index]
        for index, row in enumerate(rows)
    }


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
    scores = (scores - scores.amax(dim=1, keepdim=True)) / torch.from_numpy(columns.temperature[chosen])[:, None]
    keys = row_keys(columns.seeds[chosen], lengths[rows])
    tokens = np.empty(len(rows), dtype=np.int64)
    for index, slot in enumerate(chosen.tolist()):
        ids, kept = _filtered(scores[index], float(columns.min_p[slot]), int(columns.top_k[slot]), float(columns.top_p[slot]))
        noisy = kept.numpy().astype(np.float64) + gumbel(keys[index], ids)
        tokens[index] = ids[int(noisy.argmax())]
    return tokens


def _filtered(row: torch.Tensor, min_p: float, top_k: int, top_p: float) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Candidate ids with their scores: what min-p, top-k and top-p leave, at least the best."""
    if min_p > 0:
        row = row.masked_fill(row < float(np.log(min_p)), NEVER)  # the best has score 0
    if 0 < top_k < row.shape[0]:
        kept, ids = torch.topk(row, top_k)
    elif top_p < 1.0:
        kept, ids = _most_likely(row, top_p)
    else:
        return np.arange(row.shape[0]), row
    if top_p < 1.0:
        # The smallest set whose probability reaches top_p: a token stays when those before it do not reach it yet.
        total = torch.logsumexp((kept if 0 < top_k < row.shape[0] else row).double(), dim=0)
        before = (kept.double() - total).exp().cumsum(dim=0).roll(1)
        before[0] = 0.0
        count = max(1, int((before < top_p).sum()))
        kept, ids = kept[:count], ids[:count]
    return ids.numpy(), kept


def _most_likely(row: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough of the best, in order, to hold `top_p`. Sorting a whole vocabulary takes milliseconds; a few hundred nearly always do."""
    if row.shape[0] > FEW:
        kept, ids = torch.topk(row, FEW)
        if float((kept.double() - torch.logsumexp(row.double(), dim=0)).exp().sum()) >= top_p:
            return kept, ids
    kept, ids = torch.sort(row, descending=True, stable=True)
    return kept, ids


def prompt_logprobs(scores: torch.Tensor, targets: Sequence[int], top: int) -> TokenLogprobs:
    """Logprobs of the prompt's own tokens out of the logits `[R, V]` of the positions before them."""
    return pick_logprobs(finite_log_softmax(scores), torch.tensor(list(targets)), [top] * len(targets))
