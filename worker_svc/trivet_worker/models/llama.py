"""Llama and its kin (Llama 2 and 3, SmolLM2, Mistral): pre-norm, rotary positions, grouped heads, gated MLP."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.spec import LayerCache
from trivet_worker.forward_context import current_context
from trivet_worker.layers.attention import Attention
from trivet_worker.layers.linear import Embedding, Linear
from trivet_worker.layers.rotary import RotaryAngles, inverse_frequencies
from trivet_worker.models.model import StepOutput
from trivet_worker.weights.placement import Placement


class RmsNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return current_context().operators.rms_norm(hidden, self.weight, self.epsilon)


class LlamaAttention(nn.Module):
    def __init__(self, name: str, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.heads, self.kv_heads = heads, config.get("num_key_value_heads") or heads
        self.head_size = head_size_of(config)
        bias = bool(config.get("attention_bias", False))
        query, kv = heads * self.head_size, self.kv_heads * self.head_size
        self.qkv = Linear(hidden, (query, kv, kv), bias=bias, dtype=dtype)
        self.output = Linear(query, (hidden,), bias=bias, dtype=dtype)
        self.attention = Attention(name, heads=heads, kv_heads=self.kv_heads, head_size=self.head_size)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        count, rotary = hidden.shape[0], current_context().operators.rotary
        query, key, value = self.qkv(hidden).split(self.qkv.outputs, dim=-1)
        query = rotary(query.view(count, self.heads, self.head_size), cosines, sines)
        key = rotary(key.view(count, self.kv_heads, self.head_size), cosines, sines)
        attended = self.attention(query, key, value.view(count, self.kv_heads, self.head_size))
        output: torch.Tensor = self.output(attended.reshape(count, -1))
        return output


class LlamaMlp(nn.Module):
    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        bias = bool(config.get("mlp_bias", False))
        self.gate_and_up = Linear(hidden, (inner, inner), bias=bias, dtype=dtype)
        self.down = Linear(inner, (hidden,), bias=bias, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(current_context().operators.silu_and_mul(self.gate_and_up(hidden)))
        return output


class LlamaLayer(nn.Module):
    def __init__(self, index: int, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.attention_norm = RmsNorm(hidden, epsilon, dtype)
        self.attention = LlamaAttention(f"model.layers.{index}.self_attn", config, dtype)
        self.mlp_norm = RmsNorm(hidden, epsilon, dtype)
        self.mlp = LlamaMlp(config, dtype)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosines, sines)
        output: torch.Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class LlamaForCausalLM(nn.Module):
    """Weights are empty until the loader fills them."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, max_model_len: int) -> None:
        super().__init__()
        check_config(config)
        assert window_of(config, max_model_len) is None, "the backend was not asked for a window"
        self.vocab_size: int = config["vocab_size"]
        self.dtype = dtype
        self._max_model_len = max_model_len
        self.embedding = Embedding(self.vocab_size, config["hidden_size"], dtype=dtype)
        self._layers = [LlamaLayer(index, config, dtype) for index in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"], dtype)
        # A tied head is the embedding itself: one copy in memory.
        tied = bool(config.get("tie_word_embeddings", False))
        self.head = None if tied else Linear(config["hidden_size"], (self.vocab_size,), bias=False, dtype=dtype)
        head_size = self._layers[0].attention.head_size
        self._frequencies = inverse_frequencies(head_size, float(config.get("rope_theta", 10000.0)), config.get("rope_scaling"))
        self._angles = RotaryAngles(self._frequencies, max_model_len)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(token_ids)
        cosines, sines = self._angles.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, cosines, sines)
        output: torch.Tensor = self.norm(hidden)
        return output

    def step(self, token_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, *, wants_hidden: bool) -> StepOutput:
        hidden = self(token_ids, positions)
        return StepOutput(logits=self.logits(hidden[sampled]), hidden=hidden if wants_hidden else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        return linear(hidden, weight).float()

    def layer_caches(self) -> list[LayerCache]:
        return [
            LayerCache(layer.attention.attention.name, layer.attention.kv_heads, layer.attention.head_size, self.dtype)
            for layer in self._layers
        ]

    def placements(self) -> list[Placement]:
        places = [Placement("model.embed_tokens.weight", self.embedding.weight), Placement("model.norm.weight", self.norm.weight)]
        if self.head is not None:
            places.append(Placement("lm_head.weight", self.head.weight))
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            places += [
                Placement(f"{prefix}.input_layernorm.weight", layer.attention_norm.weight),
                Placement(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm.weight),
            ]
            for names, module in (
                (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.attention.qkv),
                (("self_attn.o_proj",), layer.attention.output),
                (("mlp.gate_proj", "mlp.up_proj"), layer.mlp.gate_and_up),
                (("mlp.down_proj",), layer.mlp.down),
            ):
                places += _merged([f"{prefix}.{name}" for name in names], module)
        return places

    def use_rope_factors(self, factors: torch.Tensor) -> None:
        """Some GGUF files bring the rotary scaling as divisors of the frequencies, float32 `[head_size / 2]`."""
        self._angles = RotaryAngles(self._frequencies / factors.double(), self._max_model_len)


def _merged(names: list[str], module: Linear) -> list[Placement]:
    """Each projection's rows within the merged weight and bias."""
    places, first = [], 0
    for name, width in zip(names, module.outputs, strict=True):
        places.append(Placement(f"{name}.weight", module.weight[first : first + width]))
        if module.bias is not None:
            places.append(Placement(f"{name}.bias", module.bias[first : first + width]))
        first += width
    return places


def head_size_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def window_of(config: Mapping[str, Any], max_model_len: int) -> int | None:
    """Tokens that a query sees at most, its own included; None: all that there can be."""
    window: int | None = config.get("sliding_window")
    return window if window is not None and window < max_model_len else None


def check_config(config: Mapping[str, Any]) -> None:
    """Raises FAILED_PRECONDITION for a feature that is not served."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"hidden_act {activation} is not served for Llama models; served is silu")
