"""Llama and its kin (Llama 2 and 3, SmolLM2, Mistral): pre-norm, rotary positions, grouped heads, gated MLP.

The model says what is computed; which operators do it is the forward context's, and how weights are kept the layer factory's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from trivet_kernels.api import AttentionForm
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.spec import LayerCache
from trivet_worker.forward_context import current_context
from trivet_worker.layers.attention import Attention
from trivet_worker.layers.factory import EmbeddingLayer, LayerFactory, LinearLayer
from trivet_worker.layers.rms_norm import RmsNorm
from trivet_worker.layers.rotary import SCALINGS, RotaryAngles, inverse_frequencies, scaling_of
from trivet_worker.models.model import StepOutput
from trivet_worker.weights.placement import Placement

SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
ACTIVATIONS = (SILU, GELU_TANH)


class LlamaAttention(nn.Module):
    def __init__(self, name: str, config: Mapping[str, Any], layers: LayerFactory, form: AttentionForm) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.heads, self.kv_heads = heads, kv_heads_of(config)
        self.head_size = head_size_of(config)
        bias = bool(config.get("attention_bias", False))
        query, kv = heads * self.head_size, self.kv_heads * self.head_size
        self.qkv = layers.linear(hidden, (query, kv, kv), bias=bias)
        self.output = layers.linear(query, (hidden,), bias=bias)
        self.attention = Attention(name, form)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        count = hidden.shape[0]
        query, key, value = torch.split(self.qkv(hidden), list(self.qkv.outputs), dim=-1)
        attended = self.attention(
            query.view(count, self.heads, self.head_size),
            key.view(count, self.kv_heads, self.head_size),
            value.view(count, self.kv_heads, self.head_size),
            cosines,
            sines,
        )
        return self.output(attended.reshape(count, -1))


class LlamaMlp(nn.Module):
    def __init__(self, config: Mapping[str, Any], layers: LayerFactory) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        bias = bool(config.get("mlp_bias", False))
        self.activation = activation_of(config)
        self.gate_and_up = layers.linear(hidden, (inner, inner), bias=bias)
        self.down = layers.linear(inner, (hidden,), bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        operators = current_context().operators
        activate = operators.silu_and_mul if self.activation == SILU else operators.gelu_tanh_and_mul
        return self.down(activate(self.gate_and_up(hidden)))


class LlamaLayer(nn.Module):
    def __init__(self, index: int, config: Mapping[str, Any], layers: LayerFactory, form: AttentionForm) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.attention_norm = RmsNorm(hidden, epsilon, layers.activation_dtype)
        self.attention = LlamaAttention(f"model.layers.{index}.self_attn", config, layers, form)
        self.mlp_norm = RmsNorm(hidden, epsilon, layers.activation_dtype)
        self.mlp = LlamaMlp(config, layers)

    def forward(self, normed: torch.Tensor, residual: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """The normed stream in, what the MLP adds to the residual stream out; what attention adds is in `residual` by then."""
        attended = self.attention(normed, cosines, sines)
        output: torch.Tensor = self.mlp(self.mlp_norm.of_sum(attended, residual))
        return output


class LlamaForCausalLM(nn.Module):
    """Weights are empty until the loader fills them."""

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, *, kv_dtype: torch.dtype, max_model_len: int) -> None:
        super().__init__()
        self.vocab_size: int = config["vocab_size"]
        self.is_whole_step = False
        self._frequencies = inverse_frequencies(head_size_of(config), float(config.get("rope_theta", 10000.0)), config.get("rope_scaling"))
        self._kv_dtype = kv_dtype
        self._max_model_len = max_model_len
        hidden, form = config["hidden_size"], attention_form_of(config, max_model_len)
        self._window = form.window
        self._layers = [LlamaLayer(index, config, layers, form) for index in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RmsNorm(hidden, config["rms_norm_eps"], layers.activation_dtype)
        self.embedding: EmbeddingLayer
        self.head: LinearLayer | None = None
        self._scores: Callable[[torch.Tensor], torch.Tensor]
        if config.get("tie_word_embeddings", False):
            tied = layers.tied_embedding(self.vocab_size, hidden)
            self.embedding, self._scores = tied, tied.scores
        else:
            self.embedding, self.head = layers.embedding(self.vocab_size, hidden), layers.head(hidden, self.vocab_size)
            self._scores = self.head
        self._angles = RotaryAngles(self._frequencies, max_model_len)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual = self.embedding(token_ids)
        cosines, sines = self._angles.at(positions)
        normed: torch.Tensor = self._layers[0].attention_norm(residual)
        for layer, next_norm in zip(self._layers, [*(layer.attention_norm for layer in self._layers[1:]), self.norm], strict=True):
            normed = next_norm.of_sum(layer(normed, residual, cosines, sines), residual)
        return normed

    def step(self, token_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, *, wants_hidden: bool) -> StepOutput:
        hidden = self(token_ids, positions)
        return StepOutput(logits=self.logits(hidden[sampled]), hidden=hidden if wants_hidden else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._scores(hidden).float()

    def layer_caches(self) -> list[LayerCache]:
        layers = [layer.attention for layer in self._layers]
        return [LayerCache(layer.attention.name, layer.kv_heads, layer.head_size, self._kv_dtype, self._window) for layer in layers]

    def placements(self) -> list[Placement]:
        places = [Placement("model.embed_tokens.weight", self.embedding.target()), Placement("model.norm.weight", self.norm.weight)]
        if self.head is not None:
            places.append(Placement("lm_head.weight", self.head.rows(0, self.vocab_size)))
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


def _merged(names: list[str], module: LinearLayer) -> list[Placement]:
    """Each projection's rows within the merged weight and bias."""
    places, first = [], 0
    for name, width in zip(names, module.outputs, strict=True):
        places.append(Placement(f"{name}.weight", module.rows(first, width)))
        if module.bias is not None:
            places.append(Placement(f"{name}.bias", module.bias[first : first + width]))
        first += width
    return places


def head_size_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads_of(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def activation_of(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_act", SILU))


def attention_form_of(config: Mapping[str, Any], max_model_len: int) -> AttentionForm:
    """A window that no context of this length reaches is none."""
    window, soft_cap = config.get("sliding_window"), config.get("attn_logit_softcapping")
    return AttentionForm(
        scale=head_size_of(config) ** -0.5,
        window=int(window) if window is not None and window < max_model_len else None,
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def check_served(config: Mapping[str, Any], file: str) -> None:
    """Raises FAILED_PRECONDITION for a feature that is not served; `file` is the config's."""
    activation = activation_of(config)
    if activation not in ACTIVATIONS:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"{file}: hidden_act {activation} is not served for Llama models; served are {', '.join(ACTIVATIONS)}",
        )
    scaling = scaling_of(config.get("rope_scaling"))
    if scaling not in SCALINGS:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION, f"{file}: rope_scaling of type {scaling} is not known; known are {', '.join(SCALINGS)}"
        )
