"""A model's sizes, as far as they say how many bytes a step reads and how many operations it takes. Read from its configuration alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivet_checkpoint import check_sizes, open_checkpoint, resolve_model


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        """A layer's weights and the head, (out, in) by name."""
        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "qkv": (query + 2 * kv, self.hidden),
            "output": (self.hidden, query),
            "gate and up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }

    @property
    def layer_values(self) -> int:
        """Weights of all layers, without the head."""
        return self.layers * sum(out * into for name, (out, into) in self.products.items() if name != "head")

    @property
    def head_values(self) -> int:
        return self.vocab * self.hidden

    def kv_values(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size

    def attention_operations(self, context: int) -> int:
        """Of one token that sees so many: scores and their weighted sum, in all layers."""
        return self.layers * 4 * self.heads * self.head_size * context


def read_dimensions(model: str) -> ModelDimensions:
    """Of a folder or file, or of the embedded default when `model` is empty. Raises `TrivetError` where it is no decoder of known sizes."""
    checkpoint = open_checkpoint(resolve_model(model))
    config: Mapping[str, Any] = checkpoint.config
    check_sizes(checkpoint)
    heads = int(config["num_attention_heads"])
    return ModelDimensions(
        name=checkpoint.name,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        inner=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
    )
