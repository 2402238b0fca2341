"""Llama and its kin with a whole step in native code (`trivet_kernels.cpu.decoder`): the same model as `llama.py`, other hands.

Weights go from the checkpoint straight into their packed form. Norms, rotation and the residual stream are float32 in every setting; only
products and the KV cache follow the dtype.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from trivet_checkpoint import Checkpoint
from trivet_kernels.cpu.decoder import HEAD, SUB_BLOCK, DecoderShape, NativeDecoder, Part, StepArrays, WeightFormat
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.backends import AttentionNeeds
from trivet_worker.attention.spec import LayerCache
from trivet_worker.forward_context import current_context
from trivet_worker.layers.rotary import RotaryAngles, inverse_frequencies
from trivet_worker.models.llama import SILU, activation_of, attention_form_of, check_config, head_size_of
from trivet_worker.models.model import StepOutput
from trivet_worker.weights.packed_rows import BLOCK_FORMATS, FORMATS, PackedRows
from trivet_worker.weights.placement import Placement
from trivet_worker.weights.quantization import Quantization


def formats_of(checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization) -> tuple[WeightFormat, WeightFormat]:
    """Of the layers' weights, and of the head's. Raises FAILED_PRECONDITION for a checkpoint that is not kept in such a form."""
    if quantization == "none":
        return FORMATS[dtype], FORMATS[dtype]
    if quantization == "int8":
        return WeightFormat.INT8, WeightFormat.INT8
    kinds = {record.kind for name, record in checkpoint.tensors.items() if ".layers." in name and len(record.shape) == 2}
    head = checkpoint.tensors.get("lm_head.weight") or checkpoint.tensors.get("model.embed_tokens.weight")
    head_kind = "" if head is None else head.kind
    if len(kinds) != 1 or not kinds <= BLOCK_FORMATS.keys() or head_kind not in BLOCK_FORMATS:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"quantization gguf: {checkpoint.path} keeps its layers in {', '.join(sorted(kinds)) or 'nothing'} and its head in "
            f"{head_kind or 'nothing'}; in place runs one kind of {', '.join(BLOCK_FORMATS)} for the layers and one for the head. "
            "Take quantization none or int8",
            param="quantization",
        )
    return BLOCK_FORMATS[kinds.pop()], BLOCK_FORMATS[head_kind]


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
    return _shape(config, needs.dtype, (FORMATS[needs.dtype], FORMATS[needs.dtype]), most_tokens=1, threads=1).reason_against()


class NativeLlama:
    """Weights are empty until the loader fills them. Raises NotBuilt when there is no native library."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        formats: tuple[WeightFormat, WeightFormat],
        max_model_len: int,
        most_tokens: int,
        threads: int,
    ) -> None:
        check_config(config)
        self.vocab_size: int = config["vocab_size"]
        self.dtype = dtype
        self._config = config
        self._max_model_len = max_model_len
        self._window = attention_form_of(config, max_model_len).window
        self._shape = replace(
            _shape(config, dtype, formats, most_tokens=most_tokens, threads=threads),
            kv_dtype=kv_dtype,
            windows=(self._window or 0,) * config["num_hidden_layers"],
        )
        self._decoder = NativeDecoder(self._shape)
        self._logits = torch.empty((0, self.vocab_size))  # as many rows as a step has sampled so far; megabytes, so not anew each time
        self._names = [f"model.layers.{index}.self_attn" for index in range(self._shape.layers)]
        self._frequencies = inverse_frequencies(self._shape.head_size, float(config.get("rope_theta", 10000.0)), config.get("rope_scaling"))
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
        query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
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
            attention_bias, mlp_bias = (bool(self._config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
            for part, names, inputs, has_bias in (
                (Part.QKV, (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)), shape.hidden, attention_bias),
                (Part.OUTPUT, (("self_attn.o_proj", shape.hidden),), query, attention_bias),
                (Part.GATE_AND_UP, (("mlp.gate_proj", shape.inner), ("mlp.up_proj", shape.inner)), shape.hidden, mlp_bias),
                (Part.DOWN, (("mlp.down_proj", shape.hidden),), shape.inner, mlp_bias),
            ):
                width = sum(rows for _, rows in names)
                first = 0
                for name, rows in names:
                    places.append(self._rows(f"{prefix}.{name}", index, part, first, rows, inputs))
                    if has_bias:
                        places.append(Placement(f"{prefix}.{name}.bias", decoder.bias(index, part, width)[first : first + rows]))
                    first += rows
        return places

    def _rows(self, name: str, layer: int, part: Part, first: int, rows: int, inputs: int) -> Placement:
        decoder = self._decoder
        target = PackedRows(
            (rows, inputs),
            lambda values: decoder.fill(layer, part, values, first),
            lambda blocks: decoder.fill_blocks(layer, part, blocks, first),
            self._shape.head_format if layer == HEAD else self._shape.format,
        )
        return Placement(f"{name}.weight", target)


def _shape(
    config: Mapping[str, Any], dtype: torch.dtype, formats: tuple[WeightFormat, WeightFormat], *, most_tokens: int, threads: int
) -> DecoderShape:
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
        format=formats[0],
        head_format=formats[1],
    )
