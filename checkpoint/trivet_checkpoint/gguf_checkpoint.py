"""A checkpoint out of one GGUF file: Hugging Face's config and names, made from its metadata."""

from pathlib import Path
from typing import Any

from trivet_proto.errors import invalid

from trivet_checkpoint.checkpoint import Checkpoint, SpecialTokens, TensorRecord
from trivet_checkpoint.entries import Entries
from trivet_checkpoint.gguf_file import GgufFile, read_gguf
from trivet_checkpoint.gguf_names import head_count_key, hugging_face_name
from trivet_checkpoint.gguf_tokenizer import adds_first_token, check_tokenizer, tokenizer_json

ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2")}
CHAT_TEMPLATE = "tokenizer.chat_template"


def open_gguf(path: Path) -> Checkpoint:
    """Raises INVALID_ARGUMENT with the file's name when it is broken or of a kind that is not known."""
    file = read_gguf(path)
    _check_architecture(file)
    check_tokenizer(file.metadata, str(path))
    tensors = _records(file)
    special = _special_tokens(file)
    config = _config(file, special, tensors)
    return Checkpoint(
        path=path,
        format="gguf",
        name=path.stem,
        config=config,
        generation_config=_generation_config(special),
        tokenizer_config=_tokenizer_config(file.metadata, special),
        special_tokens=special,
        chat_template=_entries(file).text(CHAT_TEMPLATE) if CHAT_TEMPLATE in file.metadata else None,
        chat_template_place=CHAT_TEMPLATE if CHAT_TEMPLATE in file.metadata else None,
        tensors=tensors,
        build_tokenizer=lambda: tokenizer_json(file.metadata),
    )


def _check_architecture(file: GgufFile) -> None:
    architecture = _entries(file).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise invalid(f"{file.path}: the architecture {architecture} is not known; known are {', '.join(ARCHITECTURES)}")
    if parts := file.metadata.get("split.count", 0):
        raise invalid(f"{file.path} is one of {parts} parts of a model; join them into one file first")
    if experts := file.metadata.get(f"{architecture}.expert_count", 0):
        raise invalid(f"{file.path}: a mixture of {experts} experts is not known")


def _config(file: GgufFile, special: SpecialTokens, tensors: dict[str, TensorRecord]) -> dict[str, Any]:
    metadata = file.metadata
    architecture = _entries(file).text("general.architecture")
    class_name, model_type = ARCHITECTURES[architecture]

    def count(name: str, default: int | None = None) -> int:
        return _entries(file).count(f"{architecture}.{name}", default)

    def number(name: str, default: float | None = None) -> float:
        return _entries(file).number(f"{architecture}.{name}", default)

    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_size = count("attention.key_length", hidden // heads)
    _check_agreement(file, architecture, head_size)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_size,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "max_position_embeddings": count("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": any(".self_attn." in name and name.endswith(".bias") for name in tensors),
        "mlp_bias": any(".mlp." in name and name.endswith(".bias") for name in tensors),
        "hidden_act": "silu",
        "bos_token_id": special.bos_id,
        "eos_token_id": list(special.eos_ids),
        "pad_token_id": special.pad_id,
    }
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": number("rope.scaling.factor")}
    elif scaling != "none":
        raise invalid(f"{file.path}: {architecture}.rope.scaling.type = {scaling} is not known; known are none and linear")
    return config


def _check_agreement(file: GgufFile, architecture: str, head_size: int) -> None:
    """Refuse sizes that are said twice and differ: what is served has one of each."""
    entries, tokens = _entries(file), len(file.metadata["tokenizer.ggml.tokens"])
    for name, size, meaning in (
        ("rope.dimension_count", head_size, "the whole head size"),
        ("attention.value_length", head_size, "the head size"),
        ("vocab_size", tokens, "the number of tokenizer.ggml.tokens"),
    ):
        key = f"{architecture}.{name}"
        if entries.has(key) and entries.count(key) != size:
            raise entries.refusal(key, f"{size}, {meaning}")


def _records(file: GgufFile) -> dict[str, TensorRecord]:
    entries = _entries(file)
    architecture = entries.text("general.architecture")
    records = {}
    for tensor in file.tensors:
        name = hugging_face_name(tensor.name)
        if name is None:
            continue
        key = head_count_key(architecture, tensor.name)
        heads = 0 if key is None else entries.count(key, entries.count(f"{architecture}.attention.head_count"))
        if heads and (not tensor.shape or tensor.shape[0] % (2 * heads)):
            raise invalid(f"{file.path}: tensor {tensor.name} of shape {list(tensor.shape)} is not made of {heads} heads with rotary pairs")
        records[name] = TensorRecord(name, tensor.kind, tensor.shape, file.path, tensor.offset, tensor.size, heads)
    return records


def _special_tokens(file: GgufFile) -> SpecialTokens:
    """Raises INVALID_ARGUMENT for a token at which texts begin or end that is none."""
    entries, tokens = _entries(file), file.metadata["tokenizer.ggml.tokens"]

    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return entries.token_id(key, len(tokens)) if entries.has(key) else None

    def idle_token_id(name: str) -> int | None:
        """Of a token with which nothing is computed: files that have none give a number beyond the vocabulary."""
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    def text(index: int | None) -> str | None:
        return None if index is None else tokens[index]

    bos, eos, pad, unk = token_id("bos"), token_id("eos"), idle_token_id("padding"), idle_token_id("unknown")
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
        "add_bos_token": adds_first_token(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def _entries(file: GgufFile) -> Entries:
    return Entries(file.metadata, f"{file.path}: the metadata entry ")
