"""Which form of a model runs: a whole step in native code, or its layers over a backend's operators, with weights packed or plain.

The native form is taken where there is one and the backend shares its cache; the request asks for one or the other.
"""

import logging
from dataclasses import dataclass

import torch
from trivet_checkpoint import Checkpoint
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.backends import AttentionNeeds, Selection
from trivet_worker.layers.linear import PlainLayers
from trivet_worker.layers.packed_linear import PackedLayers
from trivet_worker.models.form import ModelForm
from trivet_worker.models.llama import attention_form_of, head_size_of, kv_heads_of
from trivet_worker.models.model import Model
from trivet_worker.models.native_llama import formats_of
from trivet_worker.models.registry import forms_of
from trivet_worker.weights.quantization import Quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What the settings ask of a model."""

    form: ModelForm
    quantization: Quantization
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_model_len: int
    most_tokens: int  # of a step
    threads: int


def attention_needs(checkpoint: Checkpoint, wanted: ModelRequest) -> AttentionNeeds:
    """Raises FAILED_PRECONDITION for an architecture, or a feature of one, that is not served."""
    config = checkpoint.config
    forms_of(checkpoint).check_served(config, str(checkpoint.config_file))
    form = attention_form_of(config, wanted.max_model_len)
    return AttentionNeeds(
        dtype=wanted.dtype,
        kv_dtype=wanted.kv_dtype,
        head_size=head_size_of(config),
        block_size=wanted.block_size,
        heads_per_kv_head=-(-config["num_attention_heads"] // kv_heads_of(config)),
        window=form.window,
        soft_cap=form.soft_cap,
    )


def build_model(checkpoint: Checkpoint, wanted: ModelRequest, needs: AttentionNeeds, selection: Selection) -> Model:
    """Weights are empty until the loader fills them. Raises FAILED_PRECONDITION for a form or quantisation that cannot be."""
    config, forms, backend = checkpoint.config, forms_of(checkpoint), selection.backend
    reason = forms.reason_against_native(config, needs) if backend.packs_weights else f"the attention backend {backend.name} has none"
    if wanted.form == "native" and reason is not None:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"model_form native: {reason}. Take model_form auto or layers", param="model_form")
    if forms.native is not None and reason is None and wanted.form != "layers":
        return forms.native(
            config,
            dtype=needs.dtype,
            kv_dtype=needs.kv_dtype,
            formats=formats_of(checkpoint, needs.dtype, wanted.quantization),
            max_model_len=wanted.max_model_len,
            most_tokens=wanted.most_tokens,
            threads=wanted.threads,
        )
    logger.info("the model runs layer by layer, not as a whole native step: %s", reason or "model_form layers")
    if backend.packs_weights:
        packed = PackedLayers(needs.dtype, formats_of(checkpoint, needs.dtype, wanted.quantization))
        return forms.layered(config, packed, kv_dtype=needs.kv_dtype, max_model_len=wanted.max_model_len)
    if wanted.quantization != "none":
        reasons = (
            "; ".join(f"{name}: {against}" for name, against in selection.rejected) or f"{backend.name} was asked for; take cpu or auto"
        )
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"quantization {wanted.quantization}: only the attention backend cpu runs quantised weights ({reasons})",
            param="quantization",
        )
    return forms.layered(config, PlainLayers(needs.dtype), kv_dtype=needs.kv_dtype, max_model_len=wanted.max_model_len)
