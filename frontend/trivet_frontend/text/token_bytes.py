"""The bytes of every token of a vocabulary, read once out of `tokenizer.json`'s own words.

Byte-level vocabularies write each byte as a printable character (the GPT-2 table); others write a space as U+2581 and lone bytes as
`<0xE5>`. Added tokens are plain text. Bytes, not text, are what tokens can be joined by: a token may hold half a character.
"""

import codecs
import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# A worker that writes ids without end must not fill the log with them.
MAX_LOGGED_IDS = 64

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _TokenizerFile(msgspec.Struct):
    """The one part of `tokenizer.json` that says how tokens are written; the rest is skipped unread."""

    decoder: Any = None


class TokenBytes:
    """Token id to bytes; an id without a token gives none, and one beyond the vocabulary is logged the first time."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes) -> None:
        byte_level = "ByteLevel" in _decoder_types(msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder)
        to_bytes = _byte_level_bytes if byte_level else _plain_bytes
        self._bytes: list[bytes] = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
        self._special: set[int] = set()
        self._logged: set[int] = set()
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            self._put(token_id, to_bytes(token))
        for token_id, added in tokenizer.get_added_tokens_decoder().items():
            self._put(token_id, added.content.encode())
            if added.special:
                self._special.add(token_id)

    def _put(self, token_id: int, content: bytes) -> None:
        if token_id >= len(self._bytes):
            self._bytes.extend([b""] * (token_id + 1 - len(self._bytes)))
        self._bytes[token_id] = content

    def of(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        if skip_special_tokens and token_id in self._special:
            return b""
        if 0 <= token_id < len(self._bytes):
            return self._bytes[token_id]
        if token_id not in self._logged and len(self._logged) < MAX_LOGGED_IDS:
            self._logged.add(token_id)
            logger.warning("token %d is not in the vocabulary of %d tokens and has no text", token_id, len(self._bytes))
        return b""

    def unfinished(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of a character that `token_ids` begin and do not end."""
        # A character has at most four bytes, so no more tokens than that can share the last one.
        content = b"".join(self.of(token_id) for token_id in token_ids[-4:])
        _, read = codecs.utf_8_decode(content, "replace", False)
        return content[read:]

    def text_of(self, token_id: int) -> str:
        """One token alone; half a character is the replacement character."""
        return self.of(token_id).decode(errors="replace")

    def joined(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.of(token_id, skip_special_tokens=skip_special_tokens) for token_id in token_ids).decode(errors="replace")


def _plain_bytes(token: str) -> bytes:
    lone = _LONE_BYTE.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.replace("\u2581", " ").encode()


def _decoder_types(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = [kind for part in decoder.get("decoders", ()) for kind in _decoder_types(part)]
    return {str(decoder.get("type")), *inner}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_LATIN_BY_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # a token that the byte-level step did not write


def _latin_by_character() -> dict[int, int]:
    """The GPT-2 table: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {256 + place: byte for place, byte in enumerate(byte for byte in range(256) if byte not in printable)}


_LATIN_BY_CHARACTER = _latin_by_character()
