"""KV cache memory: one flat int8 buffer per tensor of the configuration, and each layer's strided view of it.

Layer-outermost layout: a layer's buffer is its pages one behind the other, each `[kv heads, block size, keys ‖ values]`, in int8 with the
scales; what lies where inside a page is the backend's. The buffers are mapped zeroed, so pages cost memory only once they are written.
"""

from collections.abc import Mapping, Sequence

import torch
from trivet_kernels.pages import zeroed_bytes
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2

from trivet_worker.attention.spec import LayerCache

LAYER_OUTERMOST = "layer_outermost"


def allocate_caches(config: types_pb2.KvCacheConfig, layers: Sequence[LayerCache], block_size: int) -> dict[str, torch.Tensor]:
    """Views `[blocks, kv heads, block size, content]` by layer. Raises FAILED_PRECONDITION for a configuration that does not fit."""
    by_name = {layer.layer: layer for layer in layers}
    caches: dict[str, torch.Tensor] = {}
    for tensor in config.tensors:
        if tensor.layout != LAYER_OUTERMOST or len(tensor.layers) != 1:
            raise _unfit(f"the layout {tensor.layout} over {len(tensor.layers)} layers")
        layer = by_name.get(tensor.layers[0])
        if layer is None:
            raise _unfit(f"the layer {tensor.layers[0]}")
        if tensor.size_bytes != config.num_blocks * layer.page_bytes(block_size):
            raise _unfit(f"{tensor.size_bytes} bytes for {config.num_blocks} blocks of layer {layer.layer}")
        caches[layer.layer] = strided_view(zeroed_bytes(tensor.size_bytes).view(torch.int8), layer, config.num_blocks, block_size)
    missing = by_name.keys() - caches.keys()
    if missing:
        raise _unfit(f"no memory for {', '.join(sorted(missing))}")
    return caches


def strided_view(flat: torch.Tensor, layer: LayerCache, num_blocks: int, block_size: int) -> torch.Tensor:
    """The layer's logical dimensions over its flat bytes."""
    content = layer.content
    shape = (num_blocks, layer.kv_heads, block_size, content)
    stride = (layer.kv_heads * block_size * content, block_size * content, content, 1)
    return torch.as_strided(flat.view(layer.dtype), shape, stride)


def copy_blocks(caches: Mapping[str, torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks in every layer."""
    for cache in caches.values():
        cache[targets] = cache[sources]


def zero_blocks(caches: Mapping[str, torch.Tensor], blocks: torch.Tensor) -> None:
    for cache in caches.values():
        cache[blocks] = 0


def _unfit(what: str) -> TrivetError:
    return TrivetError(ErrorKind.FAILED_PRECONDITION, f"the scheduler's KV cache configuration does not fit this model: {what}")
