"""Which tokens a double may give: whole lower-case words of the tokenizer, so that its output reads as text and never ends by itself.

An end token comes only where one is asked for. Read out of `tokenizer.json`; nothing is tokenized here.
"""

import re
from typing import Any

import msgspec
import numpy as np
from trivet_proto.errors import invalid

from trivet_doubles.tokens import Choices

WORD = re.compile(r"[Ġ▁][a-z]{2,12}")
MOST_WORDS = 4096
FEWEST_WORDS = 16


def word_ids(tokenizer_json: bytes) -> Choices:
    """Ids of words with a space before them, rising, at most 4096; every plain id where the vocabulary has hardly any such words."""
    tokenizer: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    special = {token["id"] for token in tokenizer.get("added_tokens", ())}
    vocabulary = _vocabulary(tokenizer.get("model", {}))
    words = sorted(number for text, number in vocabulary if number not in special and WORD.fullmatch(text))
    if len(words) < FEWEST_WORDS:
        words = sorted(number for _, number in vocabulary if number not in special)
    if not words:
        raise invalid("the model's tokenizer has no tokens that could be given", "model")
    return np.array(words[:MOST_WORDS], dtype=np.int32)


def with_ends(choices: Choices, end_ids: tuple[int, ...], every: int) -> Choices:
    """`choices` with an end token mixed in, so that about every so manieth token ends the request; 0: never."""
    if every < 1 or not end_ids:
        return choices
    return np.concatenate([choices, np.full(max(1, len(choices) // every), end_ids[0], dtype=np.int32)])


def _vocabulary(model: dict[str, Any]) -> list[tuple[str, int]]:
    entries = model.get("vocab", {})
    if isinstance(entries, dict):
        return list(entries.items())
    return [(entry[0], number) for number, entry in enumerate(entries)]  # Unigram: a list of (text, score)
