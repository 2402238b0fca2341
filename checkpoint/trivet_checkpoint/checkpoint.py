"""What a model's files say, whatever the format: the one form that services read.

Names of tensors and keys of `config` are Hugging Face's, also for GGUF files. A checkpoint owns no memory: its tensors are views of
the mapped files. It knows nothing of torch or of how weights are placed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_checkpoint.quantization import dequantize

SAMPLE_BYTES = 4096
Stored = TypeVar("Stored", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies. `shape` is in torch's order, rows first; `kind` names the stored format (F32, BF16, Q4_1 …).

    `rotary_heads` is not 0 where the rows of a q or k projection are in llama.cpp's rotary order (pairs side by side within each of so
    many heads) and must be brought back to Hugging Face's (halves apart) before use.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int  # bytes
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids and texts; None where the model has none."""

    bos_id: int | None
    pad_id: int | None
    unk_id: int | None
    eos_ids: tuple[int, ...]
    bos: str | None
    eos: str | None
    pad: str | None
    unk: str | None


@dataclass(frozen=True)
class Checkpoint:
    """An opened model."""

    path: Path
    format: Literal["gguf", "safetensors"]
    name: str  # what the model is called when nobody names it
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    special_tokens: SpecialTokens
    chat_template: str | None
    chat_template_place: str | None  # where in the model's files it stands, for people
    tensors: dict[str, TensorRecord]
    build_tokenizer: Callable[[], bytes]

    @property
    def config_file(self) -> Path:
        """Where `config` comes from."""
        return self.path if self.format == "gguf" else self.path / "config.json"

    def tokenizer_json(self) -> bytes:
        """A tokenizer file for `tokenizers.Tokenizer.from_buffer`."""
        return self.build_tokenizer()

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """The context, in tokens."""
        return int(self.config["max_position_embeddings"])

    def record(self, name: str) -> TensorRecord:
        record = self.tensors.get(name)
        if record is None:
            raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{self.path}: the tensor {name} is missing")
        return record

    def read(self, name: str) -> NDArray[np.uint8]:
        """The tensor's stored bytes, a view of the mapped file."""
        record = self.record(name)
        if not record.size:
            return np.empty(0, dtype=np.uint8)  # nothing to map
        try:
            return np.memmap(record.file, dtype=np.uint8, mode="r", offset=record.offset, shape=(record.size,))
        except (OSError, ValueError) as error:  # the file went away or became shorter
            raise TrivetError(
                ErrorKind.FAILED_PRECONDITION, f"{record.file}: tensor {name} cannot be read any more, the file has changed: {error}"
            ) from error

    def load(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, rows in Hugging Face's order."""
        record = self.record(name)
        raw = self.read(name)
        try:
            values = dequantize(record.kind, record.shape, raw)
        except TrivetError as error:
            raise TrivetError(error.kind, f"{record.file}: tensor {name}: {error.message}") from error
        return halves_apart(values, record.rotary_heads) if record.rotary_heads else values

    def stored_rows(self, name: str) -> NDArray[np.uint8]:
        """The tensor's stored bytes by row, uint8 `[rows, bytes of a row]`, rows in Hugging Face's order; blocks stay as they are."""
        record = self.record(name)
        rows = self.read(name).reshape(record.shape[0], -1)
        return halves_apart(rows, record.rotary_heads) if record.rotary_heads else rows

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the config, the tensor index and the first and last bytes of every tensor: quick, and different for other weights."""
        digest = hashlib.sha256(msgspec.json.encode(self.config, order="deterministic"))
        for name, record in sorted(self.tensors.items()):
            digest.update(f"\n{name} {record.kind} {record.shape} {record.rotary_heads}".encode())
            raw = self.read(name)
            digest.update(raw[:SAMPLE_BYTES].tobytes())
            digest.update(raw[-SAMPLE_BYTES:].tobytes())
        return digest.hexdigest()


def halves_apart(rows: NDArray[Stored], heads: int) -> NDArray[Stored]:
    """Rows [heads · (size/2) · 2, …] with rotary pairs side by side → [heads · 2 · (size/2), …] with the halves apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
