"""A tiny model made in code, for where no model's files are: a byte-level tokenizer with some whole words, and a chat template.

Any text can be encoded (a token a byte); the words are only ever given, never found, since no merge leads to them.
"""

from itertools import product

import msgspec
from trivet_checkpoint import ModelBundle
from trivet_checkpoint.bundle import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG

NAME = "synthetic"
CONTEXT = 8192
SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
END_ID, START_ID, PAD_ID = range(3)
ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t")
RHYMES = ("an", "el", "in", "or", "us")

TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def synthetic_bundle() -> ModelBundle:
    """Deterministic: the same bytes on every machine."""
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *_byte_letters(), *_words()))}
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for number, text in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    config = {"vocab_size": len(vocabulary), "max_position_embeddings": CONTEXT, "eos_token_id": END_ID}
    tokenizer_config = {
        "bos_token": SPECIAL[START_ID],
        "eos_token": SPECIAL[END_ID],
        "pad_token": SPECIAL[PAD_ID],
        "unk_token": None,
        "eos_token_ids": [END_ID],
    }
    files = {CONFIG: config, GENERATION_CONFIG: {}, TOKENIZER: tokenizer, TOKENIZER_CONFIG: tokenizer_config}
    encoded = {name: msgspec.json.encode(document, order="deterministic") for name, document in files.items()}
    return ModelBundle(encoded | {CHAT_TEMPLATE: TEMPLATE.encode()})


def _words() -> list[str]:
    """240 made-up words with a space before them, as byte-level vocabularies write it."""
    syllables = ["".join(parts) for parts in product(ONSETS, RHYMES)]
    return ["Ġ" + first + second for first, second in zip(syllables * 4, _turned(syllables), strict=True)]


def _turned(syllables: list[str]) -> list[str]:
    """The list four times, each time begun at another place, so that no pair comes twice."""
    return [syllable for turn in (0, 7, 19, 31) for syllable in syllables[turn:] + syllables[:turn]]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: printable ones for themselves, the others moved up by 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]
