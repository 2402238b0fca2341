"""The operators in plain torch: the meaning that the others are held against, and what runs where nothing faster does."""

from torch import set_num_threads as use_threads

from trivet_kernels.reference.attention import paged_attention
from trivet_kernels.reference.elementwise import add_rms_norm, gelu_tanh_and_mul, rms_norm, rotary, silu_and_mul
from trivet_kernels.reference.kv_write import rotary_and_write_kv, write_kv

name = "reference"

__all__ = [
    "add_rms_norm",
    "gelu_tanh_and_mul",
    "name",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotary_and_write_kv",
    "silu_and_mul",
    "use_threads",
    "write_kv",
]
