"""From layer specs and bytes to a KV cache configuration: groups, tensors and the number of blocks.

Layer-outermost layout: every layer has a flat buffer of its own, `num_blocks` pages long. Layers of equal specs form one group and share a
block table, so a block id means the same page number in each of their buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_scheduler.kv.specs import KVCacheSpec

LAYER_OUTERMOST = "layer_outermost"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layers: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One flat buffer and the layers that live in it."""

    size_bytes: int
    layers: tuple[str, ...]
    layout: str = LAYER_OUTERMOST


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """`num_blocks` counts the null block."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size


def configure(layers: Sequence[tuple[str, KVCacheSpec]], bytes_available: int, num_blocks: int | None) -> KVCacheConfig:
    """The configuration of one rank. Raises FAILED_PRECONDITION when the layers do not fit together or not even two blocks fit."""
    groups = _group(layers)
    pages = {group.spec.page_size_bytes for group in groups}
    if len(pages) > 1:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"layer groups need pages of one size, these have {sorted(pages)} bytes")
    if len(groups) > 1:
        kinds = ", ".join(type(group.spec).__name__ for group in groups)
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"models whose layers need several block tables are not served yet: {kinds}")
    bytes_per_block = sum(spec.page_size_bytes for _, spec in layers)
    fitting = bytes_available // bytes_per_block
    blocks = fitting if num_blocks is None else num_blocks
    if blocks < 2 or blocks > fitting:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"{blocks} KV blocks of {bytes_per_block} bytes do not go into {bytes_available} bytes (at least 2 are needed, {fitting} fit): "
            "set the worker's num_kv_blocks or kv_cache_memory",
        )
    tensors = tuple(KVCacheTensor(blocks * spec.page_size_bytes, (layer,)) for layer, spec in layers)
    return KVCacheConfig(blocks, tensors, groups)


def _group(layers: Sequence[tuple[str, KVCacheSpec]]) -> tuple[KVCacheGroup, ...]:
    if not layers:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, "the worker announced no layers with a KV cache")
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for layer, spec in layers:
        by_spec.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items())
