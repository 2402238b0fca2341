"""The single operators' C functions and structures, as native/operators_api.cpp declares them."""

import ctypes


class Heads(ctypes.Structure):
    """`[tokens, heads, size]`; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("heads", ctypes.c_int64),
    )


class Angles(ctypes.Structure):
    """Float32 `[tokens, size / 2]` each."""

    _fields_ = (
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("cosine_stride", ctypes.c_int64),
        ("sine_stride", ctypes.c_int64),
    )


class Cache(ctypes.Structure):
    """A layer's cache, and the slot of every token."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
    )


class Packed(ctypes.Structure):
    """A packed weight of `n` outputs and `k` inputs."""

    _fields_ = (("data", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("format", ctypes.c_int32))


_ADDRESS, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

OPERATOR_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "trivet_operators_use_threads": (None, (_INT32,)),
    "trivet_rms_norm": (None, (_INT32, _ADDRESS, _INT64, _ADDRESS, _INT64, _ADDRESS, _FLOAT, _INT64, _INT64, _ADDRESS)),
    "trivet_gated": (None, (_INT32, _INT32, _ADDRESS, _INT64, _INT64, _INT64, _ADDRESS)),
    "trivet_rotate_and_write": (_INT64, (_INT32, _INT64, _INT64, *[_ADDRESS] * 6)),
    "trivet_attention_fault": (_INT64, (_ADDRESS, _ADDRESS, _INT64, _INT64, _ADDRESS, _INT64, _INT64, _INT64)),
    "trivet_packed_bytes": (_INT64, (_ADDRESS,)),
    "trivet_pack": (None, (_ADDRESS, _INT32, _ADDRESS, _INT64, _INT64)),
    "trivet_pack_blocks": (None, (_ADDRESS, _INT32, _ADDRESS, _INT64, _INT64)),
    "trivet_packed_rows": (_INT64, (_ADDRESS, _ADDRESS, _INT64, _ADDRESS)),
    "trivet_linear": (None, (_ADDRESS, _INT32, _ADDRESS, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS)),
}
