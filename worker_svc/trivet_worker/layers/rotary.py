"""Rotary angles: how position turns the halves of each head (Su and others, 2021), with the scalings that checkpoints ask for."""

import math
from collections.abc import Mapping
from typing import Any

import torch

SCALINGS = ("default", "linear", "llama3")


def scaling_of(scaling: Mapping[str, Any] | None) -> str:
    """Its kind, be it known or not."""
    return "default" if not scaling else str(scaling.get("rope_type", "default"))


def inverse_frequencies(head_size: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """float64 `[head_size / 2]`, for one of the `SCALINGS`."""
    plain = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    kind = scaling_of(scaling)
    assert kind in SCALINGS, kind
    if kind == "default" or not scaling:
        return plain
    if kind == "linear":
        return plain / float(scaling["factor"])
    return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended (Llama 3.1)."""
    factor, low, high = float(scaling["factor"]), float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / plain
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, blended, stretched)


class RotaryAngles:
    """Cosines and sines of all positions, float32 `[max_len, head_size / 2]`."""

    def __init__(self, frequencies: torch.Tensor, max_len: int) -> None:
        # Angles in float32, as the checkpoints were trained: transformers multiplies float32 positions by float32 frequencies.
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies.to(torch.float32)[None, :]
        self.cosines, self.sines = angles.cos(), angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For int64 `[T]`: float32 `[T, head_size / 2]` each."""
        return self.cosines[positions], self.sines[positions]
