"""Llama and its kin with a whole step in native code (`trivet_kernels.cpu.decoder`): the same model as `llama.py`, other hands.

Weights go from the checkpoint straight into their packed form. Norms, rotation and the residual stream are float32 in every setting; only
products and the KV cache follow the dtype.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from trivet_checkpoint import Checkpoint, TensorRecord
from trivet_kernels.cpu.decoder import HEAD, SUB_BLOCK, DecoderShape, NativeDecoder, Part, StepArrays, WeightFormat
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.backends import AttentionNeeds
from trivet_worker.attention.spec import LayerCache
from trivet_worker.forward_context import current_context
from trivet_worker.layers.rotary import RotaryAngles, inverse_frequencies
from trivet_worker.models.llama import SILU, activation_of, attention_form_of, head_size_of
from trivet_worker.models.model import StepOutput
from trivet_worker.weights.packed_rows import BLOCK_FORMATS, FORMATS, Formats, PackedRows
from trivet_worker.weights.placement import Placement
from trivet_worker.weights.quantization import Quantization

BLOCK_VALUES = 32


def formats_of(checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization) -> Formats:
    """Raises FAILED_PRECONDITION for a checkpoint that cannot be kept in such a form."""
    if quantization == "none":
        return Formats(FORMATS[dtype], FORMATS[dtype])
    if quantization == "int8-dynamic":
        return Formats(WeightFormat.INT8, WeightFormat.INT8)
    if quantization == "int8":
        if checkpoint.config["hidden_size"] % BLOCK_VALUES:
            raise _refused(f"int8 takes blocks of {BLOCK_VALUES} values, the model's hidden size is {checkpoint.config['hidden_size']}")
        return Formats(WeightFormat.Q8_MINIMUM, WeightFormat.Q8_MINIMUM)
    head_name = "model.embed_tokens.weight" if checkpoint.config.get("tie_word_embeddings") else "lm_head.weight"
    head = BLOCK_FORMATS.get(checkpoint.record(head_name).kind, FORMATS[dtype])
    by_name = {name: _kept_in(record) for name, record in checkpoint.tensors.items() if ".layers." in name and len(record.shape) == 2}
    kinds = set(by_name.values())
    return Formats(kinds.pop(), head) if len(kinds) == 1 else Formats(WeightFormat.MIXED, head, by_name)


def _kept_in(record: TensorRecord) -> WeightFormat:
    if record.kind not in BLOCK_FORMATS:
        raise _refused(
            f"gguf: {record.file} keeps {record.name} as {record.kind}; computed on in the file's own form are {', '.join(BLOCK_FORMATS)}"
        )
    return BLOCK_FORMATS[record.kind]


def _refused(reason: str) -> TrivetError:
    return TrivetError(ErrorKind.FAILED_PRECONDITION, f"quantization {reason}. Take quantization none", param="quantization")


def reason_against(config: Mapping[str, Any], needs: AttentionNeeds) -> str | None:
    """Why the native decoder cannot run this model with these settings; None when it can."""
    try:
        native_library()
    except NotBuilt as reason:
        return str(reason)
    if needs.dtype not in FORMATS:
        return f"no {needs.dtype}; it takes {', '.join(map(str, FORMATS))}"
    if needs.block_size % SUB_BLOCK:
        return f"no blocks of {needs.block_size} tokens; multiples of {SUB_BLOCK} only"
    if activation_of(config) != SILU:
        return f"no {activation_of(config)} as activation"
    if needs.soft_cap is not None:
        return "no soft cap of scores"
    return _shape(config, needs.dtype, Formats(FORMATS[needs.dtype], FORMATS[needs.dtype]), most_tokens=1, threads=1).reason_against()


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One packed weight of a layer: the tensors whose rows it has, in order."""

    part: Part
    tensors: tuple[tuple[str, int], ...]  # name inside the layer, rows
    inputs: int
    has_bias: bool


class NativeLlama:
    """Weights are empty until the loader fills them. Raises NotBuilt when there is no native library."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        formats: Formats,
        max_model_len: int,
        most_tokens: int,
        threads: int,
    ) -> None:
        self.vocab_size: int = config["vocab_size"]
        self.is_whole_step = True
        self._frequencies = inverse_frequencies(head_size_of(config), float(config.get("rope_theta", 10000.0)), config.get("rope_scaling"))
        self.dtype = dtype
        self._config = config
        self._max_model_len = max_model_len
        self._formats = formats
        self._window = attention_form_of(config, max_model_len).window
        self._shape = replace(
            _shape(config, dtype, formats, most_tokens=most_tokens, threads=threads),
            kv_dtype=kv_dtype,
            windows=(self._window or 0,) * config["num_hidden_layers"],
        )
        self._decoder = NativeDecoder(self._shape)
        if formats.layers is WeightFormat.MIXED:
            for index, part in itertools.product(range(self._shape.layers), self._parts()):
                for name, rows in part.tensors:
                    self._decoder.add_rows(index, part.part, formats.of_layer(f"model.layers.{index}.{name}.weight"), rows)
        self._logits = torch.empty((0, self.vocab_size))  # as many rows as a step has sampled so far; megabytes, so not anew each time
        self._names = [f"model.layers.{index}.self_attn" for index in range(self._shape.layers)]
        self._angles = RotaryAngles(self._frequencies, max_model_len)

    def step(self, token_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, *, wants_hidden: bool) -> StepOutput:
        context = current_context()
        batch = context.batch
        hidden = torch.empty((len(token_ids), self._shape.hidden)) if wants_hidden else None
        arrays = StepArrays(
            token_ids=token_ids.numpy(),
            positions=positions.numpy(),
            slots=np.zeros(0, dtype=np.int64) if batch is None else batch.slot_mapping.numpy(),
            query_starts=np.array((0, len(token_ids)) if batch is None else batch.query_starts, dtype=np.int64),
            block_table=np.zeros((1, 1), dtype=np.int32) if batch is None else batch.block_table.numpy().astype(np.int32, copy=False),
            sampled_rows=sampled.numpy(),
        )
        caches = None if batch is None else [context.caches[name] for name in self._names]
        block_size = SUB_BLOCK if caches is None else caches[0].shape[2]
        if len(sampled) > len(self._logits):
            self._logits = torch.empty((len(sampled), self.vocab_size))
        logits = self._decoder.run(arrays, caches, block_size, (self._angles.cosines, self._angles.sines), hidden, self._logits)
        return StepOutput(logits=logits, hidden=hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)

    def layer_caches(self) -> list[LayerCache]:
        shape = self._shape
        return [LayerCache(name, shape.kv_heads, shape.head_size, shape.kept, self._window) for name in self._names]

    def use_rope_factors(self, factors: torch.Tensor) -> None:
        """Some GGUF files bring the rotary scaling as divisors of the frequencies, float32 `[head_size / 2]`."""
        self._angles = RotaryAngles(self._frequencies / factors.double(), self._max_model_len)

    # ---- weights ----

    def placements(self) -> list[Placement]:
        shape, decoder = self._shape, self._decoder
        tied = bool(self._config.get("tie_word_embeddings", False))
        if tied:
            places = [self._rows("model.embed_tokens", HEAD, Part.DOWN, 0, shape.vocab, shape.hidden)]
        else:
            places = [
                Placement("model.embed_tokens.weight", decoder.embedding()),
                self._rows("lm_head", HEAD, Part.DOWN, 0, shape.vocab, shape.hidden),
            ]
        places.append(Placement("model.norm.weight", decoder.norm(HEAD)))
        for index in range(shape.layers):
            prefix = f"model.layers.{index}"
            places += [
                Placement(f"{prefix}.input_layernorm.weight", decoder.norm(index, Part.ATTENTION_NORM)),
                Placement(f"{prefix}.post_attention_layernorm.weight", decoder.norm(index, Part.MLP_NORM)),
            ]
            for part in self._parts():
                width = sum(rows for _, rows in part.tensors)
                first = 0
                for name, rows in part.tensors:
                    places.append(self._rows(f"{prefix}.{name}", index, part.part, first, rows, part.inputs))
                    if part.has_bias:
                        places.append(Placement(f"{prefix}.{name}.bias", decoder.bias(index, part.part, width)[first : first + rows]))
                    first += rows
        return places

    def _parts(self) -> tuple["LayerPart", ...]:
        shape = self._shape
        query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        attention_bias, mlp_bias = (bool(self._config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
        return (
            LayerPart(
                Part.QKV, (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)), shape.hidden, attention_bias
            ),
            LayerPart(Part.OUTPUT, (("self_attn.o_proj", shape.hidden),), query, attention_bias),
            LayerPart(Part.GATE_AND_UP, (("mlp.gate_proj", shape.inner), ("mlp.up_proj", shape.inner)), shape.hidden, mlp_bias),
            LayerPart(Part.DOWN, (("mlp.down_proj", shape.hidden),), shape.inner, mlp_bias),
        )

    def _rows(self, name: str, layer: int, part: Part, first: int, rows: int, inputs: int) -> Placement:
        decoder = self._decoder
        formats, full_name = self._formats, f"{name}.weight"
        target = PackedRows(
            (rows, inputs),
            lambda values: decoder.fill(layer, part, values, first),
            lambda blocks, kind: decoder.fill_blocks(layer, part, blocks, kind, first),
            formats.head if layer == HEAD else formats.of_layer(full_name),
        )
        return Placement(full_name, target)


def _shape(config: Mapping[str, Any], dtype: torch.dtype, formats: Formats, *, most_tokens: int, threads: int) -> DecoderShape:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return DecoderShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size_of(config),
        inner=config["intermediate_size"],
        vocab=config["vocab_size"],
        epsilon=config["rms_norm_eps"],
        most_tokens=most_tokens,
        threads=threads,
        cache=dtype,
        format=formats.layers,
        head_format=formats.head,
    )
