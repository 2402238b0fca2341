"""Noise as a function: of (seed, position, token id) and of nothing else, by a counter-based hash.

The same seed gives the same tokens whatever the batch, the preemption, the replica or the restart. A row's key is the SplitMix64
finaliser over seed and position; a token's 64 bits are the finaliser over key and id (Salmon and others, "Parallel random numbers: as
easy as 1, 2, 3", 2011, on counter-based generators; Steele, Lea and Flood, 2014, on the finaliser).

Always in float64, and by a logarithm of our own: a library's differs in its last bits from processor to processor. The native sampler
(kernels, native/doubles.h) has the same bits.
"""

import numpy as np
from numpy.typing import NDArray

REVISION = 2  # part of the fingerprint: another function gives other tokens

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
    return -natural_log(-natural_log(uniform))


def natural_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of positive normal numbers, to within one unit in the last place, by sums, products and quotients in this order.

    The method of fdlibm's e_log.c: x = 2^k m with m around 1, log m by a polynomial in (m - 1) / (m + 1).
    """
    bits = x.view(np.int64)
    k = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (k << 52)).view(np.float64) - 1.0
    exponent = k.astype(np.float64)
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01) + 3.999999999940941908e-01)
    odd = z * (w * (w * (w * 1.479819860511658591e-01 + 1.818357216161805012e-01) + 2.857142874366239149e-01) + 6.666666666666735130e-01)
    rest, half = even + odd, f * f * 0.5
    log: NDArray[np.float64] = exponent * 6.93147180369123816490e-01 - (
        (half - (s * (half + rest) + exponent * 1.90821492927058770002e-10)) - f
    )
    return log


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
