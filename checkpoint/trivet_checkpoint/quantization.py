"""Stored number formats: how many bytes a tensor takes, and float32 out of them.

The block formats are those of GGUF (ggml): a row is a run of blocks, each with its scales. Everything here is vectorised numpy over as many
blocks as stay in a core's cache; nothing is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import invalid

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SUPER_BLOCK = 256
MOST_VALUES = 1 << 48
VALUES_AT_ONCE = 1 << 16
"""Half the time of all at once, whose intermediate arrays are as many new pages each."""


@dataclass(frozen=True, slots=True)
class Format:
    """`block` values are stored in `bytes` bytes."""

    name: str
    block: int
    bytes: int
    decode: Callable[[Bytes], Floats]  # [blocks, bytes] → [blocks, block]

    def size_of(self, count: int) -> int:
        """Bytes of `count` values."""
        return count // self.block * self.bytes


def dequantize(kind: str, shape: tuple[int, ...], raw: Bytes) -> Floats:
    """float32 of `shape` out of a tensor's stored bytes. Raises INVALID_ARGUMENT when kind, shape and bytes do not fit."""
    format = format_of(kind)
    count = math.prod(shape)
    if math.prod(length for length in shape if length) > MOST_VALUES:  # also where another length is 0
        raise invalid(f"a shape of {list(shape)} is larger than any array")
    if shape and shape[-1] % format.block:
        raise invalid(f"{kind}: rows of {shape[-1]} values are no multiple of its block of {format.block}")
    if raw.size != format.size_of(count):
        raise invalid(f"{kind} of shape {shape} takes {format.size_of(count)} bytes, there are {raw.size}")
    blocks, at_once = np.ascontiguousarray(raw).reshape(-1, format.bytes), VALUES_AT_ONCE // format.block
    values = np.empty((len(blocks), format.block), dtype=np.float32)
    for first in range(0, len(blocks), at_once):
        values[first : first + at_once] = format.decode(blocks[first : first + at_once])
    return values.reshape(shape)


def format_of(kind: str) -> Format:
    format = FORMATS.get(kind)
    if format is None:
        raise invalid(f"tensors stored as {kind} cannot be read; known are {', '.join(FORMATS)}")
    return format


def _half(column: Bytes) -> Floats:
    """float16 pairs of bytes [n, 2k] → float32 [n, k]."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[n, k] bytes → [n, 2k]: all low halves, then all high halves."""
    size = packed.shape[1]
    values = np.empty((len(packed), 2 * size), dtype=np.float32)
    values[:, :size] = packed & 0x0F
    values[:, size:] = packed >> 4
    return values


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32, copy=True)


def _f16(blocks: Bytes) -> Floats:
    return _half(blocks)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 2:])
    values -= 8.0
    values *= _half(blocks[:, :2])
    return values


def _q4_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks[:, :2])
    values += _half(blocks[:, 2:4])
    return values


def _fifth_bits(packed: Bytes) -> NDArray[np.uint8]:
    """[n, 4] bytes of one bit per value → [n, 32], shifted to bit 4."""
    return np.left_shift(np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little"), 4, dtype=np.uint8)


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:])
    values += _fifth_bits(blocks[:, 2:6])
    values -= 16.0
    values *= _half(blocks[:, :2])
    return values


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:])
    values += _fifth_bits(blocks[:, 4:8])
    values *= _half(blocks[:, :2])
    values += _half(blocks[:, 2:4])
    return values


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(packed: Bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minimums."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    return scales, minimums


def _scaled(blocks: Bytes, values: NDArray[Any]) -> Floats:
    scales, minimums = _k_scales(blocks[:, 4:16])
    scale = _half(blocks[:, 0:2]) * scales.astype(np.float32)
    minimum = _half(blocks[:, 2:4]) * minimums.astype(np.float32)
    result: Floats = scale[:, :, None] * values.astype(np.float32) - minimum[:, :, None]
    return result.reshape(-1, SUPER_BLOCK)


def _q4_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    return _scaled(blocks, ((packed >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & 0x0F).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 48:].reshape(-1, 4, 1, 32)
    low = ((packed >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & 0x0F).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    return _scaled(blocks, low | (high << 4))


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    values = (low & 0x0F).reshape(-1, 8, 32) | ((high & 3) << 4).reshape(-1, 8, 32)
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    result: Floats = scale[:, :, None] * (values.reshape(-1, 16, 16).astype(np.float32) - 32.0)
    return result.reshape(-1, SUPER_BLOCK)


FORMATS = {
    format.name: format
    for format in (
        Format("F32", 1, 4, _f32),
        Format("F16", 1, 2, _f16),
        Format("BF16", 1, 2, _bf16),
        Format("Q4_0", 32, 18, _q4_0),
        Format("Q4_1", 32, 20, _q4_1),
        Format("Q5_0", 32, 22, _q5_0),
        Format("Q5_1", 32, 24, _q5_1),
        Format("Q8_0", 32, 34, _q8_0),
        Format("Q4_K", SUPER_BLOCK, 144, _q4_k),
        Format("Q5_K", SUPER_BLOCK, 176, _q5_k),
        Format("Q6_K", SUPER_BLOCK, 210, _q6_k),
    )
}
