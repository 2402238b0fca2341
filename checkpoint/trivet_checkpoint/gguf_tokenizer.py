"""A `tokenizers` file out of GGUF metadata.

GGUF keeps tokens, merges and the name of the pre-tokenizer, not the tokenizer itself. The pre-tokenizer decides ids: `smollm` splits
digits one by one before the byte-level step, which a reader that knows only GPT-2's would miss.
"""

from typing import Any

import msgspec
from trivet_proto.errors import invalid

CONTROL, USER_DEFINED = 3, 4

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Json = dict[str, Any]


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_PRE_TOKENIZERS: dict[str, Json] = {
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)),
    "gpt-2": _byte_level(use_regex=True),
    "default": _byte_level(use_regex=True),
    "llama-bpe": _sequence(_split(_LLAMA3), _byte_level(use_regex=False)),
    "qwen2": _sequence(_split(_QWEN2), _byte_level(use_regex=False)),
}
_IGNORE_MERGES = {"llama-bpe"}
_ADDS_FIRST_TOKEN = {"llama-bpe"}
_NORMALIZERS: dict[str, Json] = {"qwen2": {"type": "NFC"}}


def check_tokenizer(metadata: dict[str, Any], path: str) -> None:
    """Refuse at once what cannot be built later."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise invalid(
            f"{path}: its tokenizer (tokenizer.ggml.model = {model}, tokenizer.ggml.pre = {pre}) cannot be built from the file; known are "
            f"byte-level BPE with {', '.join(_PRE_TOKENIZERS)}. A Hugging Face folder of the model brings its own tokenizer"
        )
    tokens, merges = _texts(metadata, "tokenizer.ggml.tokens", path), _texts(metadata, "tokenizer.ggml.merges", path)
    if not tokens:
        raise invalid(f"{path}: tokenizer.ggml.tokens is empty")
    odd = next((merge for merge in merges if " " not in merge), None)
    if odd is not None:
        raise invalid(f"{path}: tokenizer.ggml.merges holds {odd!r}, expected two tokens with a space between")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and (not isinstance(types, list) or len(types) != len(tokens)):
        raise invalid(f"{path}: tokenizer.ggml.token_type must be an array of {len(tokens)} types, one for each token")
    if adds_first_token(metadata) and _first_token(metadata) is None:
        raise invalid(f"{path}: tokenizer.ggml.bos_token_id, which is put before texts, is not the id of one of {len(tokens)} tokens")


def adds_first_token(metadata: dict[str, Any]) -> bool:
    """Whether a text begins with the model's first token. Files of Llama 3 leave it unsaid and mean it."""
    return bool(metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") in _ADDS_FIRST_TOKEN))


def _texts(metadata: dict[str, Any], key: str, path: str) -> list[str]:
    texts = metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(f"{path}: the metadata entry {key} is missing or no array of texts")
    return texts


def _first_token(metadata: dict[str, Any]) -> int | None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return bos if isinstance(bos, int) and 0 <= bos < len(metadata["tokenizer.ggml.tokens"]) else None


def tokenizer_json(metadata: dict[str, Any]) -> bytes:
    """The whole tokenizer as JSON."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        _added_token(index, token, kind)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    return msgspec.json.encode(document)


def _added_token(index: int, token: str, kind: int) -> Json:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == CONTROL,
    }


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> Json | None:
    """Puts the model's first token before a text, where the model wants it."""
    bos = _first_token(metadata)
    if bos is None or not adds_first_token(metadata):
        return None
    text = tokens[bos]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }
