"""What each operator means: shapes, dtypes, units. Implementations share one test suite.

Names of dimensions: T tokens of the step, S sequences, H query heads, K key/value heads (H a multiple of K), D head size, B tokens per
block, N blocks. A cache is `[N, K, B, 2 · D]`: keys first, values behind them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's sequences. Those with a single query token (decodes) come first.

    query_starts  int64[S + 1], on the host: tokens of sequence s are [query_starts[s], query_starts[s + 1])
    seq_lens      int64[S], on the host: tokens whose keys are in the cache after this step's are written
    block_table   int32 or int64[S, blocks]: rows padded with the null block 0
    slot_mapping  int64[T]: where each token's key goes, block · B + offset; −1 for padding
    num_decodes   sequences with one query token, at the front
    """

    query_starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    seq_lens_tensor: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention computes.

    scale     factor of the scores
    window    tokens that a query sees at most, its own included; None: all before it
    soft_cap  scores become `cap · tanh(score / cap)`; None: they stay
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Operators(Protocol):
    """One implementation of all operators."""

    name: str

    def use_threads(self, count: int) -> None:
        """From the next operator on, in this process."""
        ...

    def paged_attention(self, query: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, form: AttentionForm) -> torch.Tensor:
        """Causal attention of query `[T, H, D]` over the cached keys and values of each sequence; returns `[T, H, D]`."""
        ...

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put key and value `[T, K, D]` into the cache; a slot of −1 is not written."""
        ...

    def rotary_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """`rotary` of query and key, then `write_kv`; returns the rotated query."""
        ...

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """`hidden / rms(hidden) · weight` over the last dimension, computed in float32, returned in the dtype of `hidden`."""
        ...

    def add_rms_norm(self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """`residual += hidden`, in place, in their dtype; returns the norm of the sum."""
        ...

    def rotary(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate `[T, heads, D]`, halves apart (Hugging Face's order), by float32 angles given as `[T, D / 2]`."""
        ...

    def silu_and_mul(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) · up` of `[T, 2 · I]`, gate first; returns `[T, I]`."""
        ...

    def gelu_tanh_and_mul(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """The same with GELU in its form with the hyperbolic tangent."""
        ...
