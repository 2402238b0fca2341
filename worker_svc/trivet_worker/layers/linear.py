"""Matrix products with weights as checkpoints store them, `[out, in]`; several projections of one input may be merged."""

import torch
from torch import nn
from torch.nn.functional import linear

from trivet_worker.weights.placement import Target


class Linear(nn.Module):
    """`x · weightᵀ + bias`. `outputs` are the widths of the merged projections, in order."""

    def __init__(self, inputs: int, outputs: tuple[int, ...], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(sum(outputs), inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(outputs), dtype=dtype), requires_grad=False) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)

    def rows(self, first: int, count: int) -> Target:
        return self.weight[first : first + count]


class Embedding(nn.Module):
    """Token ids int64 `[T]` → `[T, hidden]`; its weight may serve as the output head too."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[token_ids]

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def target(self) -> Target:
        return self.weight


class PlainLayers:
    """All in one dtype, weights and activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.activation_dtype = dtype

    def linear(self, inputs: int, outputs: tuple[int, ...], *, bias: bool) -> Linear:
        return Linear(inputs, outputs, bias=bias, dtype=self.activation_dtype)

    def head(self, hidden_size: int, vocab_size: int) -> Linear:
        return Linear(hidden_size, (vocab_size,), bias=False, dtype=self.activation_dtype)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding(vocab_size, hidden_size, dtype=self.activation_dtype)

    def tied_embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        """One copy in memory."""
        return self.embedding(vocab_size, hidden_size)
