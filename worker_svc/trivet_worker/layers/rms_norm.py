"""Root-mean-square norm, alone or after what a layer adds to the residual stream."""

import torch
from torch import nn

from trivet_worker.forward_context import current_context


class RmsNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return current_context().operators.rms_norm(hidden, self.weight, self.epsilon)

    def of_sum(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual += hidden`, in place; the norm of that."""
        return current_context().operators.add_rms_norm(hidden, residual, self.weight, self.epsilon)
