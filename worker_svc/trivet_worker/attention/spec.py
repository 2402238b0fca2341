"""What an attention layer wants cached."""

from dataclasses import dataclass

import torch
from trivet_kernels.cpu.decoder import INT8_SCALES
from trivet_proto.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: torch.dtype  # int8: with a float32 scale for each key and each value
    sliding_window: int | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def content(self) -> int:
        """Numbers of `dtype` that a token of one head takes, scales included."""
        return 2 * self.head_size + (INT8_SCALES if self.dtype == torch.int8 else 0)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block."""
        return self.kv_heads * block_size * self.content * self.dtype.itemsize

    def to_proto(self, block_size: int) -> types_pb2.LayerKvSpec:
        spec = types_pb2.KvCacheSpec(
            block_size=block_size,
            page_size_bytes=self.page_bytes(block_size),
            num_heads=self.kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            dtype=self.dtype_name,
            quantization="per_token_head" if self.dtype == torch.int8 else "",
            full_attention=types_pb2.KvCacheSpec.FullAttention(sliding_window=self.sliding_window),
        )
        return types_pb2.LayerKvSpec(layer=self.layer, spec=spec)
