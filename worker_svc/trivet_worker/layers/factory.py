"""What a model asks for its weights' layers from: how weights are kept is chosen outside the model."""

from typing import Protocol

import torch

from trivet_worker.weights.placement import Target


class LinearLayer(Protocol):
    """`x · weightᵀ + bias`; `outputs` are the widths of the merged projections, in order."""

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def bias(self) -> torch.Tensor | None: ...

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[T, in]` → `[T, out]`."""
        ...

    def rows(self, first: int, count: int) -> Target:
        """Where a projection's weight goes."""
        ...


class EmbeddingLayer(Protocol):
    """Token ids int64 `[T]` → `[T, hidden]`, tensors of their own, in the dtype of activations."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def target(self) -> Target: ...


class TiedEmbedding(EmbeddingLayer, Protocol):
    """One that is the output head too."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, hidden]` → `[R, vocabulary]`."""
        ...


class LayerFactory(Protocol):
    """One way to keep a model's weights."""

    @property
    def activation_dtype(self) -> torch.dtype: ...

    def linear(self, inputs: int, outputs: tuple[int, ...], *, bias: bool) -> LinearLayer: ...

    def head(self, hidden_size: int, vocab_size: int) -> LinearLayer: ...

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingLayer: ...

    def tied_embedding(self, vocab_size: int, hidden_size: int) -> TiedEmbedding: ...
