"""What a model's description must say, in Hugging Face's words: which entries there are, of which type, and which fit together.

Whatever opens a checkpoint reads its description (`read_description`); whatever computes with its sizes checks them first (`check_sizes`).
Both raise INVALID_ARGUMENT with the file, the key, the value and what was expected. Tensors are not looked at.
"""

from collections.abc import Collection, Mapping
from typing import Any

from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet_checkpoint.checkpoint import Checkpoint
from trivet_checkpoint.entries import Entries

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "sliding_window")
OPTIONAL_NUMBERS = ("rope_theta", "attn_logit_softcapping")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
TEXTS = ("hidden_act",)
SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""What a generation_config.json says for requests that say nothing themselves."""
ROPE = ("rope_parameters", "rope_scaling")
ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What each kind of scaling needs."""


def read_description(config: Mapping[str, Any], file: str, served: Collection[str] | None) -> dict[str, Any]:
    """`config` with one spelling for what newer and older ones spell differently, without entries that are null."""
    if served is not None:
        served_architecture(config, file, served)
    entries = Entries({key: value for key, value in config.items() if value is not None}, f"{file}: ")
    entries.count("max_position_embeddings")
    check_token_ids(config, file, entries.count("vocab_size"))
    if entries.has("tie_word_embeddings"):
        entries.flag("tie_word_embeddings")
    below = [entries.below(key) for key in ROPE]
    rope = below[0] if below[0].values else below[1]
    read = dict(entries.values)
    if rope.has("rope_theta"):
        rope.number("rope_theta")
        read["rope_theta"] = rope.values["rope_theta"]
    kind = rope.text("rope_type", rope.text("type", "default"))
    for key in ROPE_NUMBERS.get(kind, ()):
        rope.number(key)
    if kind == "llama3" and rope.values["high_freq_factor"] <= rope.values["low_freq_factor"]:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor, which is {rope.values['low_freq_factor']}")
    read["rope_scaling"] = {**rope.values, "rope_type": kind} if kind != "default" else None
    return read


def check_generation(config: Mapping[str, Any], file: str, vocab_size: int) -> None:
    """What generation_config.json says of sampling must be numbers; which of them are taken is for those who sample."""
    check_token_ids(config, file, vocab_size)
    entries = Entries(config, f"{file}: ")
    for key in SAMPLING_NUMBERS:
        if entries.has(key) and type(config[key]) not in (int, float):
            raise entries.refusal(key, "a number")


def check_token_ids(config: Mapping[str, Any], file: str, vocab_size: int) -> None:
    """Of config.json or generation_config.json. A token at which texts begin or end is one of the vocabulary."""
    entries = Entries(config, f"{file}: ")
    if entries.has("eos_token_id") and max(entries.token_ids("eos_token_id"), default=0) >= vocab_size:
        raise entries.refusal("eos_token_id", f"less than vocab_size, which is {vocab_size}")
    for name in ("bos_token_id", "pad_token_id", "unk_token_id"):
        if entries.has(name) and type(config[name]) is not int:
            raise entries.refusal(name, "the id of a token, a whole number")
    if entries.has("bos_token_id") and config["bos_token_id"] >= vocab_size:
        raise entries.refusal("bos_token_id", f"less than vocab_size, which is {vocab_size}")


def served_architecture(config: Mapping[str, Any], file: str, served: Collection[str]) -> str:
    """The first of the model's that is served. Raises FAILED_PRECONDITION where none is."""
    named = config.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    known = next((name for name in names if isinstance(name, str) and name in served), None)
    if known is None:
        asked = ", ".join(name if isinstance(name, str) and name.isidentifier() else repr(name) for name in names) or "unnamed"
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"{file}: the architecture {asked} is not served; served are {', '.join(served)}")
    return known


def check_sizes(checkpoint: Checkpoint) -> None:
    """That all is there which a decoder of this kind is made by, each of its type, and that it fits together."""
    entries = Entries(checkpoint.config, f"{checkpoint.config_file}: ")
    for key in SIZES:
        entries.count(key)
    entries.number("rms_norm_eps")
    for key in OPTIONAL_COUNTS:
        if entries.has(key):
            entries.count(key)
    for key in OPTIONAL_NUMBERS:
        if entries.has(key):
            entries.number(key)
    for key in FLAGS:
        if entries.has(key):
            entries.flag(key)
    for key in TEXTS:
        if entries.has(key):
            entries.text(key)
    _check_heads(entries)


def _check_heads(entries: Entries) -> None:
    hidden, heads = entries.count("hidden_size"), entries.count("num_attention_heads")
    if heads % entries.count("num_key_value_heads", heads):
        raise entries.refusal("num_attention_heads", f"a multiple of num_key_value_heads, which is {entries.values['num_key_value_heads']}")
    if entries.has("head_dim"):
        if entries.count("head_dim") % 2:
            raise entries.refusal("head_dim", "an even number")
    elif hidden % (2 * heads):
        raise invalid(
            f"{entries.where}hidden_size is {hidden}, expected a multiple of 2 · num_attention_heads = {2 * heads}, or a head_dim beside it"
        )
