"""Which tensors a Llama is made of, and how much memory they take: told by its config, before anything of it is built."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from trivet_worker.models.llama import head_size_of, kv_heads_of
from trivet_worker.weights.placement import NeededTensor


def needed_tensors(config: Mapping[str, Any]) -> Iterator[NeededTensor]:
    """Those outside the layers first, then layer by layer."""
    yield from _outside_layers(config)
    for index in range(config["num_hidden_layers"]):
        yield from _of_layer(index, config)


def weight_values(config: Mapping[str, Any]) -> int:
    """How many numbers all weights have."""
    outside, layer = (sum(prod(tensor.shape) for tensor in tensors) for tensors in (_outside_layers(config), _of_layer(0, config)))
    return outside + int(config["num_hidden_layers"]) * layer


def _outside_layers(config: Mapping[str, Any]) -> Iterator[NeededTensor]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield NeededTensor("model.embed_tokens.weight", (vocab, hidden))
    yield NeededTensor("model.norm.weight", (hidden,))
    if not config.get("tie_word_embeddings", False):
        yield NeededTensor("lm_head.weight", (vocab, hidden))


def _of_layer(index: int, config: Mapping[str, Any]) -> Iterator[NeededTensor]:
    hidden, inner, prefix = config["hidden_size"], config["intermediate_size"], f"model.layers.{index}"
    query, kv = config["num_attention_heads"] * head_size_of(config), kv_heads_of(config) * head_size_of(config)
    yield NeededTensor(f"{prefix}.input_layernorm.weight", (hidden,))
    yield NeededTensor(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", query, hidden, "attention_bias"),
        ("self_attn.k_proj", kv, hidden, "attention_bias"),
        ("self_attn.v_proj", kv, hidden, "attention_bias"),
        ("self_attn.o_proj", hidden, query, "attention_bias"),
        ("mlp.gate_proj", inner, hidden, "mlp_bias"),
        ("mlp.up_proj", inner, hidden, "mlp_bias"),
        ("mlp.down_proj", hidden, inner, "mlp_bias"),
    ):
        yield NeededTensor(f"{prefix}.{name}.weight", (outputs, inputs))
        if config.get(bias, False):
            yield NeededTensor(f"{prefix}.{name}.bias", (outputs,))
