"""Root-mean-square norm, alone and with the residual stream (Zhang and Sennrich, 2019)."""

import torch

from trivet_kernels.cpu.operators.memory import as_rows, floats, same_dtype, type_of, writable_in_place
from trivet_kernels.cpu.operators.registration import register
from trivet_kernels.cpu.operators.threads import operator_library


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`hidden / rms(hidden) · weight` over the last dimension of any shape, in the dtype of `hidden`."""
    normed: torch.Tensor = _RMS_NORM(hidden, weight, epsilon)
    return normed


def add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`residual += hidden`, in place; gives the norm of the sum."""
    normed: torch.Tensor = _ADD_RMS_NORM(hidden, residual, weight, epsilon)
    return normed


def _run(hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    output, number, rows = torch.empty(hidden.shape, dtype=hidden.dtype), type_of(hidden), as_rows(hidden)
    weights = floats(weight)
    if weight.shape != hidden.shape[-1:]:
        raise ValueError(f"a weight {list(weight.shape)} for rows of {hidden.shape[-1]}")
    operator_library().trivet_rms_norm(
        number,
        rows.data_ptr(),
        rows.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weights.data_ptr(),
        epsilon,
        *rows.shape,
        output.data_ptr(),
    )
    return output


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _run(hidden, None, weight, epsilon)


def _add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    same_dtype(hidden, residual)
    if hidden.shape != residual.shape:
        raise ValueError(f"a residual {list(residual.shape)} beside {list(hidden.shape)}")
    if writable_in_place(residual):
        return _run(hidden, residual, weight, epsilon)
    rows = residual.reshape(-1, residual.shape[-1]).contiguous()
    normed = _run(hidden, rows, weight, epsilon)
    if rows.data_ptr() != residual.data_ptr():
        residual.copy_(rows.view(residual.shape))
    return normed


def _fake_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _fake_add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


_RMS_NORM = register("rms_norm(Tensor hidden, Tensor weight, float epsilon) -> Tensor", _rms_norm, _fake_rms_norm)
_ADD_RMS_NORM = register(
    "add_rms_norm(Tensor hidden, Tensor(a!) residual, Tensor weight, float epsilon) -> Tensor", _add_rms_norm, _fake_add_rms_norm
)
