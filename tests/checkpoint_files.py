"""Writes the default model in other formats: GGUF files of several types and Hugging Face folders, out of transformers' weights.

All values are rounded to float16 before anything is written, so that an F16 GGUF file and a folder hold the very same numbers. GGUF files
get q and k rows in llama.cpp's rotary order, as its converter writes them; the order is worked out here apart from the package that
undoes it.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from trivet_checkpoint import open_checkpoint, resolve_model

from tests.references.model import packaged_file, reference_model

Weights = dict[str, torch.Tensor]


def rounded_model(layers: int | None = None) -> Any:
    """transformers' model with weights that float16 can hold, or only its first `layers` layers."""
    model = reference_model()
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.config.layer_types = None
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


def weights_of(model: Any) -> Weights:
    """Copies by Hugging Face's names, float32; a tied head isn't among them."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}


def write_folder(folder: Path, model: Any, weights: Weights, *, left_out: str | None = None, **config: Any) -> Path:
    """A Hugging Face folder in float16; `config` changes entries of config.json, `left_out` is the key that it lacks."""
    folder.mkdir()
    packaged = open_checkpoint(resolve_model(None))
    written = model.config.to_dict() | {"dtype": "float16", "architectures": ["LlamaForCausalLM"]} | config
    written.pop("quantization_config", None)
    if left_out is not None:
        del written[left_out]
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "tokenizer.json").write_bytes(packaged.tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(packaged.tokenizer_config | {"chat_template": packaged.chat_template}))
    (folder / "generation_config.json").write_text(json.dumps(packaged.generation_config))
    save_file({name: value.half().clone() for name, value in weights.items()}, str(folder / "model.safetensors"))
    return folder


@cache
def packaged_fields() -> Mapping[str, Any]:
    return gguf.GGUFReader(packaged_file()).fields


def write_gguf(
    file: Path, weights: Weights, kind: gguf.GGMLQuantizationType, *, unquantised: tuple[str, ...] = (), extra: bool = False
) -> Path:
    """A GGUF file with the packaged one's metadata, its matrices as `kind` and those of `unquantised` names as F16.

    With `extra` it also holds what only llama.cpp reads: rotary frequency factors, all of them one.
    """
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in packaged_fields().items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == "llama.block_count" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, value in weights.items():
        short = names.get_name(name, try_suffixes=(".weight",))
        assert short is not None, name
        array = rotary_order(name, value.numpy())
        stored = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else gguf.GGMLQuantizationType.F16 if name in unquantised else kind
        writer.add_tensor(short, gguf.quants.quantize(array, stored), raw_dtype=stored)
    if extra:
        writer.add_tensor("rope_freqs.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rotary_order(name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of q (9 heads) and k (3 heads) with each head's two halves interleaved; other tensors as they are."""
    heads = 9 if ".q_proj." in name else 3 if ".k_proj." in name else 0
    if not heads:
        return rows
    place = np.arange(rows.shape[0]).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
    return np.ascontiguousarray(rows[place])
