"""Matrix products with packed weights, over the native operators; activations are float32 whatever the weights' format."""

import torch
from torch import nn
from trivet_kernels.cpu.decoder import WeightFormat
from trivet_kernels.cpu.operators import PackedWeight, linear, packed_rows
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.layers.linear import Embedding
from trivet_worker.weights.packed_rows import Formats, PackedRows
from trivet_worker.weights.placement import Target


def rows_of(weight: PackedWeight, first: int, count: int) -> PackedRows:
    return PackedRows(
        (count, weight.inputs),
        lambda values: weight.fill(values, first),
        lambda blocks, kind: weight.fill_blocks(blocks, kind, first),
        weight.format,
    )


class PackedLinear(nn.Module):
    """`x · weightᵀ + bias`. `outputs` are the widths of the merged projections, in order."""

    def __init__(self, inputs: int, outputs: tuple[int, ...], *, bias: bool, format: WeightFormat) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = PackedWeight.empty(format, sum(outputs), inputs)
        self.bias = torch.zeros(sum(outputs)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)

    def rows(self, first: int, count: int) -> Target:
        return rows_of(self.weight, first, count)


class PackedEmbedding(nn.Module):
    """The rows of a packed output head, which needs no second copy."""

    def __init__(self, vocab_size: int, hidden_size: int, *, format: WeightFormat) -> None:
        super().__init__()
        self.weight = PackedWeight.empty(format, vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return packed_rows(token_ids, self.weight)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def target(self) -> Target:
        return rows_of(self.weight, 0, self.weight.outputs)


class WideEmbedding(Embedding):
    """An embedding that is not the head: kept in the model's dtype, given out in float32."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids).float()


class PackedLayers:
    """Weights in the formats of the layers and of the head; an embedding of its own in `dtype`. Raises FAILED_PRECONDITION."""

    activation_dtype = torch.float32

    def __init__(self, dtype: torch.dtype, formats: Formats) -> None:
        if formats.layers is WeightFormat.MIXED:
            raise TrivetError(
                ErrorKind.FAILED_PRECONDITION,
                "quantization gguf: the file keeps its layers in several kinds of blocks, which takes a whole native step, and this "
                "model runs layer by layer. Take quantization none or int8",
                param="quantization",
            )
        self._dtype = dtype
        self._format, self._head_format = formats.layers, formats.head

    def linear(self, inputs: int, outputs: tuple[int, ...], *, bias: bool) -> PackedLinear:
        return PackedLinear(inputs, outputs, bias=bias, format=self._format)

    def head(self, hidden_size: int, vocab_size: int) -> PackedLinear:
        return PackedLinear(hidden_size, (vocab_size,), bias=False, format=self._head_format)

    def embedding(self, vocab_size: int, hidden_size: int) -> WideEmbedding:
        return WideEmbedding(vocab_size, hidden_size, dtype=self._dtype)

    def tied_embedding(self, vocab_size: int, hidden_size: int) -> PackedEmbedding:
        return PackedEmbedding(vocab_size, hidden_size, format=self._head_format)
