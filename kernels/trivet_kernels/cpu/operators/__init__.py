"""The native operators one by one, registered with `torch.library` in the namespace `trivet`: for models that have no native step.

Each has a fake that mirrors shape, dtype and strides, and gives new contiguous tensors, never an alias of an input; what changes an input
says so. They take float32 and bfloat16, contiguous or not, and run over one team of threads for the whole process.
"""

from trivet_kernels.cpu.operators.activations import gelu_tanh_and_mul, silu_and_mul
from trivet_kernels.cpu.operators.attention import paged_attention
from trivet_kernels.cpu.operators.kv_cache import rotary, rotary_and_write_kv, write_kv
from trivet_kernels.cpu.operators.norms import add_rms_norm, rms_norm
from trivet_kernels.cpu.operators.packed_weights import PackedWeight, linear, packed_rows
from trivet_kernels.cpu.operators.threads import use_threads

name = "cpu"

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "gelu_tanh_and_mul",
    "linear",
    "name",
    "packed_rows",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotary_and_write_kv",
    "silu_and_mul",
    "use_threads",
    "write_kv",
]
