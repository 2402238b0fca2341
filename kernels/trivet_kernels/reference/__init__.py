"""The operators in plain torch: the meaning that the others are held against, and what runs where nothing faster does."""

from trivet_kernels.reference.attention import paged_attention
from trivet_kernels.reference.elementwise import rms_norm, rotary, silu_and_mul
from trivet_kernels.reference.kv_write import write_kv

name = "reference"

__all__ = ["name", "paged_attention", "rms_norm", "rotary", "silu_and_mul", "write_kv"]
