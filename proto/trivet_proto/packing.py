"""Arrays on the wire: packed little-endian values in `bytes`.

Unpacking gives a read-only view of the message's bytes, one-dimensional; nothing is copied. An array whose bytes are not a whole number of
values is the sender's fault and is refused by name.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trivet_proto.errors import ErrorKind, TrivetError

I32 = np.dtype("<i4")
U32 = np.dtype("<u4")
F32 = np.dtype("<f4")
U8 = np.dtype("u1")


def pack_i32(values: ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype=I32).tobytes()


def pack_u32(values: ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype=U32).tobytes()


def pack_f32(values: ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype=F32).tobytes()


def pack_u8(values: ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype=U8).tobytes()


def unpack_i32(data: bytes, name: str = "int32 array") -> NDArray[np.int32]:
    return np.frombuffer(_whole(data, 4, name), dtype=I32)


def unpack_u32(data: bytes, name: str = "uint32 array") -> NDArray[np.uint32]:
    return np.frombuffer(_whole(data, 4, name), dtype=U32)


def unpack_f32(data: bytes, name: str = "float32 array") -> NDArray[np.float32]:
    return np.frombuffer(_whole(data, 4, name), dtype=F32)


def unpack_u8(data: bytes, name: str = "uint8 array") -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=U8)


def split_ragged(values: NDArray[np.int32], counts: NDArray[np.int32], name: str = "ragged array") -> Sequence[NDArray[np.int32]]:
    """Rows of a ragged array given as its values and one count per row."""
    if counts.size == 0:
        return []
    ends = np.cumsum(counts, dtype=np.int64)
    if (counts < 0).any() or ends[-1] != values.size:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{name}: the counts add up to {int(ends[-1])}, but there are {values.size} values")
    return np.split(values, ends[:-1])


def _whole(data: bytes, item_bytes: int, name: str) -> bytes:
    if len(data) % item_bytes:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{name}: {len(data)} bytes are not a multiple of {item_bytes}")
    return data
