"""GGUF's tensor names in Hugging Face's words."""

import re

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "model.rope_factors",
}

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Architectures whose converter reorders q and k rows for llama.cpp's rotary kernel; the others keep Hugging Face's order.
REORDERED = {"llama": {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}}


def hugging_face_name(name: str) -> str | None:
    """None for a tensor that only llama.cpp needs."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return None
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def head_count_key(architecture: str, name: str) -> str | None:
    """The metadata key that counts the heads whose rows of tensor `name` were reordered; None where they were not."""
    match = _BLOCK.fullmatch(name)
    parts = REORDERED.get(architecture, {})
    return f"{architecture}.{parts[match[2]]}" if match is not None and match[2] in parts else None
