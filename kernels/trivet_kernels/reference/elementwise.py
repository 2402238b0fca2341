"""Norm, rotation and activation. Arithmetic in float32, whatever the storage."""

import torch
from torch.nn.functional import gelu, silu


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * scaled.to(hidden.dtype)).to(hidden.dtype)


def add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    residual += hidden
    return rms_norm(residual, weight, epsilon)


def rotary(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = states.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return rotated.to(states.dtype)


def silu_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_tanh_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up
