"""Names for the content of full blocks: a chain, so that a block's name stands for everything before it too.

SHA-256 with a fixed root: the same in every process, which lets replicas and routers speak of the same blocks. Extra keys go in, in this
order: adapter revision, media (identifier and offset in the block), salt (first block only), prompt embeddings.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT = hashlib.sha256(b"trivet prefix hash, revision 1").digest()


@dataclass(frozen=True, slots=True)
class HashKeys:
    """What beside the tokens decides a request's KV."""

    adapter: bytes = b""
    salt: bytes = b""


def extend_chain(chain: list[bytes], later_ids: NDArray[np.int32], block_size: int, keys: HashKeys) -> None:
    """Append the hashes of the full blocks of `later_ids`: the tokens after those that `chain` stands for."""
    for start in range(0, len(later_ids) - block_size + 1, block_size):
        chain.append(block_hash(chain[-1] if chain else ROOT, later_ids[start : start + block_size], len(chain), keys))


def block_hash(parent: bytes, token_ids: NDArray[np.int32], index: int, keys: HashKeys) -> bytes:
    digest = hashlib.sha256(parent)
    digest.update(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    if keys.adapter:
        digest.update(b"adapter" + keys.adapter)
    if keys.salt and index == 0:
        digest.update(b"salt" + keys.salt)
    return digest.digest()


def group_key(block_hash: bytes, group: int) -> bytes:
    """Groups share a chain but not blocks: the group's number makes the key."""
    return block_hash + group.to_bytes(4, "little")


def coarser_chain(chain: Sequence[bytes], factor: int) -> list[bytes]:
    """The chain of blocks `factor` times as long: each ends where one of the finer chain's does."""
    return list(chain[factor - 1 :: factor])
