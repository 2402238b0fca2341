"""The attention layer: turns query and key by position, writes this step's keys and values, then attends over the cache."""

import torch
from torch import nn
from trivet_kernels.api import AttentionForm

from trivet_worker.forward_context import current_context


class Attention(nn.Module):
    """Causal attention of one layer; `name` finds its cache."""

    def __init__(self, name: str, form: AttentionForm) -> None:
        super().__init__()
        self.name = name
        self.form = form

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        """`[T, heads, D]`, `[T, kv heads, D]` twice, angles `[T, D / 2]` → `[T, heads, D]`.

        Zeros while profiling, when there is no batch.
        """
        context = current_context()
        if context.batch is None:
            return torch.zeros_like(query)
        cache, operators = context.caches[self.name], context.operators
        rotated = operators.rotary_and_write_kv(query, key, value, cosines, sines, cache, context.batch.slot_mapping)
        return operators.paged_attention(rotated, cache, context.batch, self.form)
