"""Tensors as native code wants them: of a known type, the last dimension contiguous, nothing that overlaps where it is written.

Dimensions of size 1 may have any stride in torch; nothing here or in native code steps along one.
"""

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers of `CacheType` in native/attention.h."""


def type_of(states: torch.Tensor) -> int:
    """Raises TypeError for a dtype that the operators do not take."""
    number = TYPES.get(states.dtype)
    if number is None:
        raise TypeError(f"no {states.dtype}; the native operators take {', '.join(map(str, TYPES))}")
    return number


def dense_last(states: torch.Tensor) -> torch.Tensor:
    """The same, or a copy where the last dimension is not contiguous."""
    return states if states.stride(-1) == 1 or states.shape[-1] <= 1 else states.contiguous()


def as_rows(states: torch.Tensor) -> torch.Tensor:
    """`[rows, size]`, a view where strides allow one."""
    return dense_last(states.reshape(-1, states.shape[-1]))


def floats(values: torch.Tensor) -> torch.Tensor:
    return dense_last(values if values.dtype is torch.float32 else values.float())


def same_dtype(first: torch.Tensor, *others: torch.Tensor) -> None:
    """Raises TypeError."""
    for other in others:
        if other.dtype is not first.dtype:
            raise TypeError(f"{other.dtype} beside {first.dtype}: both are of one dtype")


def writable_in_place(states: torch.Tensor) -> bool:
    """Whether rows `[rows, size]` can be written where they lie. Raises ValueError when two of them share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(states.stride(), states.shape, strict=True)):
        raise ValueError("a tensor that is expanded cannot be written in place: take a contiguous one")
    return states.dim() == 2 and (states.stride(1) == 1 or states.shape[1] <= 1)
