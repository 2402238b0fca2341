"""Matrix products with weights as checkpoints store them, `[out, in]`; several projections of one input may be merged."""

import torch
from torch import nn
from torch.nn.functional import linear


class Linear(nn.Module):
    """`x · weightᵀ + bias`. `outputs` are the widths of the merged projections, in order."""

    def __init__(self, inputs: int, outputs: tuple[int, ...], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(sum(outputs), inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(outputs), dtype=dtype), requires_grad=False) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)


class Embedding(nn.Module):
    """Token ids int64 `[T]` → `[T, hidden]`; its weight may serve as the output head too."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[token_ids]
