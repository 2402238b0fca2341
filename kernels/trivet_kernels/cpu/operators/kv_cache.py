"""Rotation by position, and keys and values on their way into the paged cache, apart or in one pass.

The number of tokens that are written is the slot mapping's. A cache is `[N, K, B, 2 · D]` in its outer form; what lies where inside a block
is private to the native code (native/attention.h), so others copy and zero whole blocks only.
"""

import ctypes

import torch

from trivet_kernels.cpu.attention_signatures import CacheType
from trivet_kernels.cpu.decoder import HEAD_SIZE_MULTIPLE, INT8_SCALES, SUB_BLOCK
from trivet_kernels.cpu.operator_signatures import Angles, Cache, Heads
from trivet_kernels.cpu.operators.memory import TYPES, dense_last, floats, same_dtype, type_of
from trivet_kernels.cpu.operators.registration import register
from trivet_kernels.cpu.operators.threads import operator_library

INT8_TYPES = {torch.float32: CacheType.INT8_FLOAT32, torch.bfloat16: CacheType.INT8_BFLOAT16}


def rotary(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """`[T, heads, D]`, halves apart, turned by float32 angles `[T, D / 2]`."""
    rotated: torch.Tensor = _ROTARY(states, cosines, sines)
    return rotated


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Key and value `[T, K, D]` into the cache; a slot of −1 is not written. Raises IndexError for one outside the cache."""
    _WRITE(key, value, cache, slot_mapping)


def rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Gives the rotated query; the rotated key and the value go into the cache."""
    rotated: torch.Tensor = _ROTARY_AND_WRITE(query, key, value, cosines, sines, cache, slot_mapping)
    return rotated


def check_cache(cache: torch.Tensor) -> int:
    """The head size. Raises ValueError for a tensor that cannot be a cache, TypeError for its dtype."""
    if cache.dtype is not torch.int8:
        type_of(cache)
    size = (cache.shape[-1] - (INT8_SCALES if cache.dtype is torch.int8 else 0)) // 2
    if cache.dim() != 4 or not cache.is_contiguous() or cache.shape[2] % SUB_BLOCK or size <= 0 or size % HEAD_SIZE_MULTIPLE:
        raise ValueError(
            f"a cache is contiguous [blocks, key/value heads, tokens, 2 · head size], tokens in multiples of {SUB_BLOCK} and heads of "
            f"multiples of {HEAD_SIZE_MULTIPLE}, not {list(cache.shape)} with strides {list(cache.stride())}"
        )
    return size


def type_of_cache(cache: torch.Tensor, states: torch.Tensor) -> int:
    """The number of its `CacheType`: an int8 cache is read and written for products in the type of the states."""
    return INT8_TYPES[states.dtype] if cache.dtype is torch.int8 else TYPES[cache.dtype]


def _heads(states: torch.Tensor) -> Heads:
    return Heads(states.data_ptr(), states.stride(0), states.stride(1), states.shape[1])


def _rotary(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    output, states = torch.empty(states.shape, dtype=states.dtype), dense_last(states)
    cosines, sines = _checked_angles(states, cosines, sines)
    angles = Angles(cosines.data_ptr(), sines.data_ptr(), cosines.stride(0), sines.stride(0))
    operator_library().trivet_rotate_and_write(
        type_of(states),
        states.shape[0],
        states.shape[2],
        ctypes.byref(angles),
        ctypes.byref(_heads(states)),
        output.data_ptr(),
        None,
        None,
        None,
    )
    return output


def _write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    _write(key, value, None, cache, slot_mapping, None, None)


def _rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    same_dtype(query, key)
    count = slot_mapping.shape[0]
    output, query = torch.empty(query.shape, dtype=query.dtype), dense_last(query)
    cosines, sines = _checked_angles(query, cosines, sines)
    if query.shape[0] != count:
        raise ValueError(f"{query.shape[0]} queries for {count} slots")
    angles = Angles(cosines.data_ptr(), sines.data_ptr(), cosines.stride(0), sines.stride(0))
    _write(key, value, angles, cache, slot_mapping, query, output)
    return output


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    angles: Angles | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor | None,
    output: torch.Tensor | None,
) -> None:
    same_dtype(key, value)
    size, count, (blocks, kv_heads, block_size, _) = check_cache(cache), slot_mapping.shape[0], cache.shape
    if key.shape != value.shape or key.shape[0] < count or key.shape[1:] != (kv_heads, size):
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} for {count} slots of a cache {list(cache.shape)}")
    key, value, slots = dense_last(key), dense_last(value), slot_mapping.to(torch.int64).contiguous()
    native = Cache(cache.data_ptr(), type_of_cache(cache, key), blocks, block_size, kv_heads, slots.data_ptr())
    outside = operator_library().trivet_rotate_and_write(
        type_of(key),
        count,
        size,
        None if angles is None else ctypes.byref(angles),
        None if query is None else ctypes.byref(_heads(query)),
        None if output is None else output.data_ptr(),
        ctypes.byref(_heads(key)),
        ctypes.byref(_heads(value)),
        ctypes.byref(native),
    )
    if outside >= 0:
        raise IndexError(f"slot {outside} is outside a cache of {blocks} blocks of {block_size} tokens")


def _checked_angles(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (states.shape[0], states.shape[2] // 2)
    if states.dim() != 3 or states.shape[2] % 2 or cosines.shape != wanted or sines.shape != wanted:
        raise ValueError(f"angles {list(cosines.shape)} and {list(sines.shape)} for states {list(states.shape)}")
    return floats(cosines), floats(sines)


def _fake_rotary(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    return states.new_empty(states.shape)


def _fake_write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    return None


def _fake_rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    return query.new_empty(query.shape)


_ROTARY = register("rotary(Tensor states, Tensor cosines, Tensor sines) -> Tensor", _rotary, _fake_rotary)
_WRITE = register("write_kv(Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping) -> ()", _write_kv, _fake_write_kv)
_ROTARY_AND_WRITE = register(
    "rotary_and_write_kv(Tensor query, Tensor key, Tensor value, Tensor cosines, Tensor sines, Tensor(a!) cache, Tensor slot_mapping)"
    " -> Tensor",
    _rotary_and_write_kv,
    _fake_rotary_and_write_kv,
)
