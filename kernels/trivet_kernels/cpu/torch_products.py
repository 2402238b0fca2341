"""What torch's own bfloat16 products reach here: the matrix rate of a server that is built on them.

Weights are packed as oneDNN wants them, so many of them that no cache holds them, and results are allocated as torch does it. What the
machine's instructions allow is told by `limits`.
"""

import time
from collections.abc import Callable, Sequence

import torch

ROWS = 256


def torch_product_rate(shapes: Sequence[tuple[int, int]], threads: int, rounds: int) -> float | None:
    """Operations a second with weights of `shapes`, (out, in), one after the other: the best of `rounds` times through them all. None where
    this torch has no oneDNN."""
    if not torch._C._has_mkldnn:
        return None
    products = [_product(out, into) for out, into in shapes]
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for _ in range(1 + rounds):  # the first makes the code
            started = time.perf_counter()
            for product in products:
                product()
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * ROWS * sum(out * into for out, into in shapes) / min(seconds[1:])


def _product(out: int, into: int) -> Callable[[], torch.Tensor]:
    rows = torch.full((ROWS, into), 0.5, dtype=torch.bfloat16)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.full((out, into), 0.5, dtype=torch.bfloat16), ROWS)
    return lambda: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
