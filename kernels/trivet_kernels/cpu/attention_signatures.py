"""Paged attention's C functions and structure, as native/attention_api.cpp declares them."""

import ctypes
from enum import IntEnum


class CacheType(IntEnum):
    """What a KV cache holds, and what it is multiplied in; the numbers are those of native/attention.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8_FLOAT32 = 2
    INT8_BFLOAT16 = 3


class AttentionCall(ctypes.Structure):
    """`TrivetAttention`; addresses are of arrays that the caller keeps alive."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
        ("is_output_bfloat16", ctypes.c_int32),
        ("shares_prefixes", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


ATTENTION_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "trivet_paged_attention": (ctypes.c_int64, (ctypes.c_void_p,)),
}
