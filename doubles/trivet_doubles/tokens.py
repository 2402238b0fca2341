"""The token law: which token a double "samples", as a pure function of the ids before it, the seed and the position.

Every KV slot of a double holds a 64-bit value: the value of the slot before it plus a hash of its own token and position. The value of the
last slot thus stands for all ids so far, and the next token is a hash of it, the seed and the position, looked up in a list of ids that
may be given. A worker that finds another value in a slot than the ids call for gives another token; `expected_output` needs no slots.

Nothing here knows blocks, requests or messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

REVISION = 1
"""Of the law: two revisions give different tokens."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
ROOT = 0x7472697665740001
"""The value before the first slot. No slot of an empty pool (0) looks as if it were written."""

Choices = NDArray[np.int32]
Values = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TokenLaw:
    """The law over the ids that may be given (`choices`, int32, not empty); an id that stands there twice comes twice as often."""

    choices: Choices

    def stream(self, ids: Sequence[int], seed: int) -> Iterator[int]:
        """The tokens after `ids`, without end."""
        value = int(slot_values(np.asarray(ids, dtype=np.int32))[-1]) if len(ids) else ROOT
        position = len(ids)
        salt = _mix(seed)
        choices: list[int] = self.choices.tolist()
        while True:
            token = choices[_mix(value ^ salt ^ position) % len(choices)]
            yield token
            value = (value + hash_of(token, position)) & MASK
            position += 1


def expected_output(prompt_ids: Sequence[int], seed: int, count: int, choices: Choices) -> list[int]:
    """The first `count` tokens after a prompt; `seed` is the child's own (`child_seed` of the request's)."""
    return list(islice(TokenLaw(choices).stream(prompt_ids, seed), count))


def hash_of(token: int, position: int) -> int:
    """What a slot adds to the value of the one before it."""
    return _mix(token * GOLDEN + position)


def slot_hashes(ids: NDArray[np.int32], positions: NDArray[np.int64]) -> Values:
    """`hash_of`, elementwise."""
    return mix(ids.astype(np.uint64) * np.uint64(GOLDEN) + positions.astype(np.uint64))


def slot_values(ids: NDArray[np.int32], first_position: int = 0, before: int = ROOT) -> Values:
    """What the slots of `ids` hold (uint64 [len(ids)]), when the slot before the first holds `before`."""
    positions = np.arange(first_position, first_position + len(ids))
    return np.cumsum(slot_hashes(ids, positions), dtype=np.uint64) + np.uint64(before)


def next_tokens(last: Values, seeds: Values, positions: NDArray[np.int64], choices: Choices) -> NDArray[np.int32]:
    """The token at each position (int32 [n]) after slots whose last values are `last`."""
    hashes = mix(last ^ mix(seeds) ^ positions.astype(np.uint64))
    return choices[(hashes % np.uint64(len(choices))).astype(np.int64)]


def mix(values: Values) -> Values:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    """`mix` of one Python integer, modulo 2^64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * FIRST_FACTOR) & MASK
    value = ((value ^ (value >> 27)) * SECOND_FACTOR) & MASK
    return value ^ (value >> 31)
