"""Which scheduler gets a request: the one that has its prefix, unless that one is much busier than the least busy.

Pure but for a bounded memory of which scheduler last had which prefix. It asks nothing of the network.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

# Prompts that agree in this many tokens go to one scheduler: long enough to tell system prompts apart, short enough that most chats reach
# it.
PREFIX_TOKENS = 64
REMEMBERED_PREFIXES = 4096
# How many more requests the prefix's owner may have than the least busy scheduler before load alone decides.
IMBALANCE_LIMIT = 8


class Candidate(Protocol):
    """What routing must know of a scheduler."""

    address: str

    @property
    def queue_length(self) -> int: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Router:
    """Prefix affinity over load; owns the memory of prefixes."""

    def __init__(self) -> None:
        self._owner_by_prefix: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, candidates: Sequence[CandidateT], prompt_ids: Sequence[int]) -> CandidateT:
        """One of `candidates`, which must not be empty."""
        least = min(candidates, key=lambda candidate: candidate.queue_length)
        if len(candidates) == 1:
            return least
        prefix = _digest(prompt_ids[:PREFIX_TOKENS])
        owner = self._owner_by_prefix.get(prefix)
        chosen = least
        for candidate in candidates:
            if candidate.address == owner and candidate.queue_length - least.queue_length <= IMBALANCE_LIMIT:
                chosen = candidate
        self._owner_by_prefix[prefix] = chosen.address
        self._owner_by_prefix.move_to_end(prefix)
        if len(self._owner_by_prefix) > REMEMBERED_PREFIXES:
            self._owner_by_prefix.popitem(last=False)
        return chosen


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
