"""A checkpoint out of one GGUF file: Hugging Face's config and names, made from its metadata."""

from pathlib import Path
from typing import Any

from trivet_proto.errors import invalid

from trivet_checkpoint.checkpoint import Checkpoint, SpecialTokens, TensorRecord
from trivet_checkpoint.gguf_file import GgufFile, read_gguf
from trivet_checkpoint.gguf_names import head_count_key, hugging_face_name
from trivet_checkpoint.gguf_tokenizer import check_tokenizer, tokenizer_json

ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2")}


def open_gguf(path: Path) -> Checkpoint:
    """Raises INVALID_ARGUMENT with the file's name when it is broken or of a kind that is not known."""
    file = read_gguf(path)
    check_tokenizer(file.metadata, str(path))
    tensors = _records(file)
    special = _special_tokens(file.metadata)
    config = _config(file, special, tied="lm_head.weight" not in tensors)
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        generation_config=_generation_config(special),
        tokenizer_config=_tokenizer_config(file.metadata, special),
        special_tokens=special,
        chat_template=template,
        tensors=tensors,
        build_tokenizer=lambda: tokenizer_json(file.metadata),
    )


def _config(file: GgufFile, special: SpecialTokens, *, tied: bool) -> dict[str, Any]:
    metadata = file.metadata
    architecture = _need(file, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise invalid(f"{file.path}: the architecture {architecture} is not known; known are {', '.join(ARCHITECTURES)}")
    class_name, model_type = ARCHITECTURES[architecture]

    def fact(name: str, default: Any = None) -> Any:
        key = f"{architecture}.{name}"
        return _need(file, key) if default is None else metadata.get(key, default)

    heads, hidden = fact("attention.head_count"), fact("embedding_length")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": fact("attention.key_length", hidden // heads),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "rope_theta": fact("rope.freq_base", 10000.0),
        "max_position_embeddings": fact("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": special.bos_id,
        "eos_token_id": list(special.eos_ids),
        "pad_token_id": special.pad_id,
        "_name": file.path.stem,
    }
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": fact("rope.scaling.factor")}
    elif scaling != "none":
        raise invalid(f"{file.path}: {architecture}.rope.scaling.type = {scaling} is not known; known are none and linear")
    return config


def _records(file: GgufFile) -> dict[str, TensorRecord]:
    architecture = file.metadata.get("general.architecture", "")
    records = {}
    for tensor in file.tensors:
        name = hugging_face_name(tensor.name)
        if name is None:
            continue
        key = head_count_key(architecture, tensor.name)
        heads = 0 if key is None else int(file.metadata.get(key, file.metadata.get(f"{architecture}.attention.head_count", 0)))
        records[name] = TensorRecord(name, tensor.kind, tensor.shape, file.path, tensor.offset, tensor.size, heads)
    return records


def _special_tokens(metadata: dict[str, Any]) -> SpecialTokens:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    def text(index: int | None) -> str | None:
        return None if index is None else tokens[index]

    bos, eos, pad, unk = token_id("bos"), token_id("eos"), token_id("padding"), token_id("unknown")
    ends = tuple(dict.fromkeys(index for index in (eos, token_id("eot"), token_id("eom")) if index is not None))
    return SpecialTokens(bos, pad, unk, ends, text(bos), text(eos), text(pad), text(unk))


def _generation_config(special: SpecialTokens) -> dict[str, Any]:
    return {"bos_token_id": special.bos_id, "eos_token_id": list(special.eos_ids), "pad_token_id": special.pad_id}


def _tokenizer_config(metadata: dict[str, Any], special: SpecialTokens) -> dict[str, Any]:
    return {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "unk_token": special.unk,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def _need(file: GgufFile, key: str) -> Any:
    if key not in file.metadata:
        raise invalid(f"{file.path}: the metadata entry {key} is missing")
    return file.metadata[key]
