"""What an attention layer wants cached."""

from dataclasses import dataclass

import torch
from trivet_proto.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block."""
        return self.kv_heads * block_size * 2 * self.head_size * self.dtype.itemsize

    def to_proto(self, block_size: int) -> types_pb2.LayerKvSpec:
        spec = types_pb2.KvCacheSpec(
            block_size=block_size,
            page_size_bytes=self.page_bytes(block_size),
            num_heads=self.kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            dtype=self.dtype_name,
            full_attention=types_pb2.KvCacheSpec.FullAttention(),
        )
        return types_pb2.LayerKvSpec(layer=self.layer, spec=spec)
