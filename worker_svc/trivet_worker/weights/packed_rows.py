"""Packed weights as places that a checkpoint's tensors go to, and which kinds of tensors they take as they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from trivet_kernels.cpu.decoder import WeightFormat

FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}
BLOCK_FORMATS = {kind: WeightFormat[kind] for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
"""Kinds of a file's blocks that are multiplied as they are."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model's weights are kept."""

    layers: WeightFormat
    head: WeightFormat
    by_name: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Of the layers' tensors, where `layers` is MIXED."""

    def of_layer(self, name: str) -> WeightFormat:
        """Any for a tensor that the file lacks: refusing that is the loader's."""
        return self.by_name.get(name, WeightFormat.Q8_0) if self.layers is WeightFormat.MIXED else self.layers


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a packed weight, as a place that a checkpoint's tensor is copied into."""

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], None]
    fill_blocks: Callable[[torch.Tensor, WeightFormat], None]
    format: WeightFormat

    def takes_blocks(self, kind: str) -> bool:
        """Blocks of the weight's own kind stay as they are; formats of ours are made out of any."""
        return BLOCK_FORMATS.get(kind) == self.format or (kind in BLOCK_FORMATS and self.format not in BLOCK_FORMATS.values())

    def copy_(self, values: torch.Tensor) -> None:
        self.fill(values)

    def copy_blocks(self, rows: torch.Tensor, kind: str) -> None:
        """Uint8 `[rows, bytes of a row]`."""
        self.fill_blocks(rows, BLOCK_FORMATS[kind])
