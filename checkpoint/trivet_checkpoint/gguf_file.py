"""The header of a GGUF file: metadata and where each tensor lies. Quick: the default model's 49 000 tokens and merges take some 30 ms.

Layout (GGUF v2 and v3, little-endian): magic, version, tensor count, metadata count, metadata, tensor infos, padding, tensor data.
A broken file is an error that names the file, what was being read and what was expected.
"""

import mmap
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trivet_proto.errors import TrivetError, invalid

from trivet_checkpoint.entries import FETCH_AGAIN
from trivet_checkpoint.quantization import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TENSOR_KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
MOST_DIMENSIONS = 8
DEEPEST_ARRAY = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in torch's order; `offset` from the file's start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises INVALID_ARGUMENT when the file is foreign, broken or cut off."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:  # cannot be mapped
                raise invalid(f"{path} is no GGUF file: it is empty; {FETCH_AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view).read()
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """A position in the mapped header."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._at = 0
        self._reading = "the magic"

    def read(self) -> GgufFile:
        try:
            return self._read()
        except (struct.error, IndexError, OverflowError, MemoryError) as error:
            raise self._broken(
                f"the file of {len(self._view)} bytes ends before it, or the entry before it is broken; {FETCH_AGAIN}"
            ) from error

    def _read(self) -> GgufFile:
        if self._view[:4] != MAGIC:
            raise invalid(
                f"{self._path} is no GGUF file: it begins with {self._view[:4]!r}, expected {MAGIC!r}; name another file, or {FETCH_AGAIN}"
            )
        self._at = 4
        self._reading = "the version"
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise invalid(f"{self._path}: GGUF version {version} cannot be read; known are {VERSIONS[0]} and {VERSIONS[1]}")
        tensor_count, metadata_count = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(metadata_count):
            self._reading = "the name of a metadata entry"
            key = self._string()
            self._reading = f"the metadata entry {key}"
            metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        twice = sorted(name for name, count in Counter(info[0] for info in infos).items() if count > 1)
        if twice:
            raise self._broken(f"tensor {twice[0]} is described twice")
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise self._broken(f"general.alignment is {alignment!r}, expected a positive whole number")
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, tuple(self._place(*info, start, alignment) for info in infos))

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        self._reading = "the name of a tensor"
        name = self._string()
        self._reading = f"the description of tensor {name}"
        dimensions = self._scalar("<I")
        if dimensions > MOST_DIMENSIONS:
            raise self._broken(f"it has {dimensions} dimensions, expected {MOST_DIMENSIONS} at most")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        number = self._scalar("<I")
        kind = TENSOR_KINDS.get(number)
        if kind is None:
            raise invalid(
                f"{self._path}: tensor {name} is stored in GGUF type {number}, which cannot be read; known are {', '.join(FORMATS)}"
            )
        return name, kind, shape[::-1], self._scalar("<Q")

    def _place(self, name: str, kind: str, shape: tuple[int, ...], offset: int, start: int, alignment: int) -> GgufTensor:
        if offset % alignment:
            raise invalid(
                f"{self._path}: tensor {name} lies at {offset}, expected a multiple of general.alignment, which is {alignment}; "
                f"{FETCH_AGAIN}"
            )
        format = FORMATS[kind]
        count = 1
        for length in shape:
            count *= length
        if shape and shape[-1] % format.block:
            raise invalid(f"{self._path}: tensor {name}: rows of {shape[-1]} are no multiple of {kind}'s block of {format.block}")
        size = format.size_of(count)
        if start + offset + size > len(self._view):
            raise invalid(
                f"{self._path}: tensor {name} ({kind}, {size} bytes at {start + offset}) lies past the file's end at {len(self._view)}: "
                f"the file is cut off; {FETCH_AGAIN}"
            )
        return GgufTensor(name, kind, shape, start + offset, size)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(self._scalar("<I"), self._scalar("<Q"), depth + 1)
        return self._scalar(self._format(kind))

    def _array(self, kind: int, count: int, depth: int) -> list[Any]:
        if depth > DEEPEST_ARRAY:
            raise self._broken(f"arrays within arrays, expected {DEEPEST_ARRAY} levels at most")
        if kind == STRING:
            return self._strings(count)
        if kind == ARRAY:
            return [self._value(ARRAY, depth) for _ in range(count)]
        dtype = np.dtype(self._format(kind))
        if self._at + count * dtype.itemsize > len(self._view):
            raise IndexError
        values: list[Any] = np.frombuffer(self._view, dtype=dtype, count=count, offset=self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def _strings(self, count: int) -> list[str]:
        view, at, end = self._view, self._at, len(self._view)
        length_of = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):  # the hot loop of opening a file: no method calls per string
            (length,) = length_of(view, at)
            at += 8
            if at + length > end:
                raise IndexError
            strings.append(view[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self._view, self._at)
        self._at += struct.calcsize(format)
        return value

    def _format(self, kind: int) -> str:
        format = SCALARS.get(kind)
        if format is None:
            raise self._broken(f"value type {kind} is not known; known are 0 to 12")
        return format

    def _broken(self, why: str) -> TrivetError:
        return invalid(f"{self._path}: while reading {self._reading}: {why}")
