"""Log probabilities of tokens: the chosen one with its rank, and the most likely ones. Never NaN, never infinite."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

FLOOR = -9999.0  # stands for an impossible token


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Per token: the chosen id first, then the top n. Ragged, as in the contract."""

    counts: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    values: NDArray[np.float32]
    ranks: NDArray[np.int32]


def finite_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float32 `[R, V]` → log probabilities with a floor."""
    return torch.log_softmax(logits, dim=-1).clamp_min_(FLOOR)


def pick_logprobs(scores: torch.Tensor, chosen: torch.Tensor, tops: NDArray[np.int32]) -> TokenLogprobs:
    """Out of `[R, V]` log probabilities (or logits), for chosen ids int64 `[R]` and so many top entries per row."""
    rows = scores.shape[0]
    values = scores.gather(1, chosen[:, None])[:, 0]
    ranks = (scores > values[:, None]).sum(dim=1) + 1
    most = int(tops.max(initial=0))
    top_values, top_ids = torch.topk(scores, most, dim=1) if most else (scores[:, :0], torch.empty(rows, 0, dtype=torch.int64))
    width = tops.astype(np.int32)
    ids = np.concatenate([chosen[:, None].numpy(), top_ids.numpy()], axis=1).astype(np.int32)
    numbers = np.concatenate([values[:, None].numpy(), top_values.numpy()], axis=1).astype(np.float32)
    wanted = np.arange(most + 1)[None, :] <= width[:, None]
    return TokenLogprobs(width + 1, ids[wanted], np.nan_to_num(numbers[wanted], nan=FLOOR, neginf=FLOOR), ranks.numpy().astype(np.int32))
