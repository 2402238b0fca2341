"""The files of a model that a frontend needs, in one deterministic blob named by its SHA-256: no weights, no paths, no pickle."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from trivet_proto.errors import invalid

from trivet_checkpoint.checkpoint import Checkpoint

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_PLACE = "chat_template_place"
"""The key of the tokenizer's configuration that says where in the model's files the chat template stands."""
NEEDED = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG)


@dataclass(frozen=True)
class ModelBundle:
    """File name → content. The chat template is missing where the model has none."""

    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return self._encoded

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self._encoded).digest()

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.msgpack.encode({name: self.files[name] for name in sorted(self.files)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "ModelBundle":
        """Raises INVALID_ARGUMENT when the data is no bundle or lacks a file."""
        try:
            bundle = cls(msgspec.msgpack.decode(data, type=dict[str, bytes]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"the model bundle cannot be read: {error}") from error
        missing = [name for name in NEEDED if name not in bundle.files]
        if missing:
            raise invalid(f"the model bundle lacks {', '.join(missing)}")
        return bundle

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the bundle."""
        try:
            document: dict[str, Any] = msgspec.json.decode(self.files[name], type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"the model bundle's {name} is no JSON object: {error}") from error
        return document

    @property
    def chat_template(self) -> str | None:
        template = self.files.get(CHAT_TEMPLATE)
        return None if template is None else template.decode()


def bundle_of(checkpoint: Checkpoint) -> ModelBundle:
    """Deterministic: the same model gives the same bytes wherever it is opened."""

    def encode(document: dict[str, Any]) -> bytes:
        return msgspec.json.encode(document, order="deterministic")

    special = checkpoint.special_tokens
    tokenizer_config = {
        **{key: value for key, value in checkpoint.tokenizer_config.items() if key != "chat_template"},
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "unk_token": special.unk,
        "eos_token_ids": list(special.eos_ids),
    }
    if checkpoint.chat_template_place is not None:
        tokenizer_config[CHAT_TEMPLATE_PLACE] = checkpoint.chat_template_place
    files = {
        CONFIG: encode(checkpoint.config),
        GENERATION_CONFIG: encode(checkpoint.generation_config),
        TOKENIZER: checkpoint.tokenizer_json(),
        TOKENIZER_CONFIG: encode(tokenizer_config),
    }
    if checkpoint.chat_template is not None:
        files[CHAT_TEMPLATE] = checkpoint.chat_template.encode()
    return ModelBundle(files)
