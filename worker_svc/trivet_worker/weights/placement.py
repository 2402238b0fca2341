"""Where a checkpoint's tensor goes: a parameter, or rows of one that several projections share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


class Target(Protocol):
    """A tensor, or whatever else takes a tensor's values, in any floating dtype."""

    @property
    def shape(self) -> Sequence[int]: ...

    def copy_(self, values: torch.Tensor, /) -> object: ...


@runtime_checkable
class BlockTarget(Target, Protocol):
    """A target that takes a checkpoint's quantised blocks, of the kinds that it knows."""

    def takes_blocks(self, kind: str, /) -> bool: ...

    def copy_blocks(self, rows: torch.Tensor, kind: str, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """`target` takes the tensor named `name`, same shape."""

    name: str
    target: Target


@dataclass(frozen=True, slots=True)
class NeededTensor:
    """What a checkpoint must hold, before there is a place for it."""

    name: str
    shape: tuple[int, ...]
