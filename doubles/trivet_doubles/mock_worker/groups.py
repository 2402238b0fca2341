"""The layer groups of a KV cache configuration: how each finds its slots, and how far back each looks.

Only kinds that cache a slot per token are simulated (full, sliding window, chunked, latent); of the others the block tables are kept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2

SALT = 0x5BD1E9955BD1E995  # sets apart what the groups write, since they share the pool's blocks


@dataclass(frozen=True, slots=True)
class Group:
    """One block table. `window` and `chunk` are in tokens, 0 where the group looks at everything."""

    index: int
    block_size: int
    window: int = 0
    chunk: int = 0
    has_token_slots: bool = True

    @property
    def salt(self) -> np.uint64:
        return np.uint64(self.index * SALT & ((1 << 64) - 1))

    def first_read(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that a step which runs from `computed` on looks at."""
        if self.window:
            return np.maximum(computed - self.window + 1, 0)
        if self.chunk:
            return computed // self.chunk * self.chunk
        return np.zeros_like(computed)


def groups_of(config: types_pb2.KvCacheConfig) -> tuple[Group, ...]:
    """Raises FAILED_PRECONDITION for a configuration without groups."""
    if not config.groups:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, "the scheduler configured no KV cache groups")
    return tuple(_group(index, group.spec) for index, group in enumerate(config.groups))


def _group(index: int, spec: types_pb2.KvCacheSpec) -> Group:
    kind = spec.WhichOneof("kind")
    return Group(
        index=index,
        block_size=spec.block_size,
        window=spec.sliding_window.window if kind == "sliding_window" else 0,
        chunk=spec.chunked_local_attention.chunk_size if kind == "chunked_local_attention" else 0,
        has_token_slots=kind not in ("mamba", "cross_attention"),
    )
