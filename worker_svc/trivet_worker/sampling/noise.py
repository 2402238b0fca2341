"""Noise as a function: of (seed, position, token id) and of nothing else, by a counter-based hash.

The same seed gives the same tokens whatever the batch, the preemption, the replica or the restart. A row's key is the SplitMix64
finaliser over seed and position; a token's 64 bits are the finaliser over key and id (Salmon and others, "Parallel random numbers: as
easy as 1, 2, 3", 2011, on counter-based generators; Steele, Lea and Flood, 2014, on the finaliser).
"""

import numpy as np
from numpy.typing import NDArray

REVISION = 1  # part of the fingerprint: another function gives other tokens

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SCALE = 2.0**-52


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key per row. `positions` are those of the tokens to be sampled, in the whole sequence."""
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)


def gumbel(keys: NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for tokens of rows with these keys (both broadcast): argmax(score + noise) is a sample of softmax(score)."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + (token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits and a half are exact in float64, so neither 0 nor 1 can come out, whose noise would be infinite.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _SCALE
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
