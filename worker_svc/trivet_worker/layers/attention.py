"""The attention layer: writes this step's keys and values, then attends over the cache."""

import torch
from torch import nn

from trivet_worker.forward_context import current_context


class Attention(nn.Module):
    """Causal attention of one layer; `name` finds its cache."""

    def __init__(self, name: str, *, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.name = name
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.scale = head_size**-0.5

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[T, heads, D]`, `[T, kv heads, D]` twice → `[T, heads, D]`. Zeros while profiling, when there is no batch."""
        context = current_context()
        if context.batch is None:
            return torch.zeros_like(query)
        cache = context.caches[self.name]
        context.operators.write_kv(key, value, cache, context.batch.slot_mapping)
        return context.operators.paged_attention(query, cache, context.batch, self.scale)
