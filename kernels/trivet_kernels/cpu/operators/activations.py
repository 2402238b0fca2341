"""Gated activations of an MLP."""

import torch

from trivet_kernels.cpu.operators.memory import as_rows, type_of
from trivet_kernels.cpu.operators.registration import register
from trivet_kernels.cpu.operators.threads import operator_library


def silu_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` of `[…, 2 · I]`, gate first; gives `[…, I]`."""
    activated: torch.Tensor = _SILU(gate_and_up)
    return activated


def gelu_tanh_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    """The same with GELU by its formula with the tangent."""
    activated: torch.Tensor = _GELU(gate_and_up)
    return activated


def _run(gate_and_up: torch.Tensor, *, is_gelu: int) -> torch.Tensor:
    output, rows = _fake(gate_and_up), as_rows(gate_and_up)
    operator_library().trivet_gated(
        is_gelu, type_of(rows), rows.data_ptr(), rows.stride(0), rows.shape[0], output.shape[-1], output.data_ptr()
    )
    return output


def _silu(gate_and_up: torch.Tensor) -> torch.Tensor:
    return _run(gate_and_up, is_gelu=0)


def _gelu(gate_and_up: torch.Tensor) -> torch.Tensor:
    return _run(gate_and_up, is_gelu=1)


def _fake(gate_and_up: torch.Tensor) -> torch.Tensor:
    if gate_and_up.shape[-1] % 2:
        raise ValueError(f"gate and up side by side are an even number of columns, not {gate_and_up.shape[-1]}")
    return gate_and_up.new_empty((*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2))


_SILU = register("silu_and_mul(Tensor gate_and_up) -> Tensor", _silu, _fake)
_GELU = register("gelu_tanh_and_mul(Tensor gate_and_up) -> Tensor", _gelu, _fake)
