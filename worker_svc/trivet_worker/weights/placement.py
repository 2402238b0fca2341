"""Where a checkpoint's tensor goes: a parameter, or rows of one that several projections share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Placement:
    """`target` is a view that takes the tensor named `name`, same shape, any floating dtype."""

    name: str
    target: torch.Tensor
