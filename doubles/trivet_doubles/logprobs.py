"""Log probabilities that a double reports: made up, but always the same for a token at a position, and in the contract's form."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from trivet_proto.packing import pack_f32, pack_i32, split_ragged, unpack_f32, unpack_i32
from trivet_proto.v1 import types_pb2

from trivet_doubles.tokens import Choices, hash_of

Entry: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Of one token: the chosen id and the top ones, and the log probability of each."""

STEP = 0.5  # between one of the top tokens and the next


def logprobs_message(tokens: Iterable[tuple[int, int, int]], choices: Choices) -> types_pb2.Logprobs:
    """For each (token id, position, top n): the token first, then the n most likely, of which it is the first."""
    counts: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for token, position, top in tokens:
        mixed = hash_of(token, position)
        best = -0.01 - (mixed % 256) / 1024
        rivals = _rivals(token, mixed, choices, top - 1)
        ids += [token, *([token] if top else []), *rivals]
        values += [best, *([best] if top else []), *(best - STEP * place for place in range(1, len(rivals) + 1))]
        counts.append(1 + min(top, 1) + len(rivals))
    return types_pb2.Logprobs(counts=pack_i32(counts), token_ids=pack_i32(ids), values=pack_f32(values), ranks=pack_i32([1] * len(counts)))


def entries_of(message: types_pb2.Logprobs) -> list[Entry]:
    """What a message says of each of its tokens."""
    counts = unpack_i32(message.counts, "logprobs.counts")
    ids = split_ragged(unpack_i32(message.token_ids, "logprobs.token_ids"), counts, "logprobs.token_ids")
    values = np.split(unpack_f32(message.values, "logprobs.values"), np.cumsum(counts)[:-1])
    return [(tuple(row.tolist()), tuple(numbers.tolist())) for row, numbers in zip(ids, values, strict=True)]


def _rivals(token: int, mixed: int, choices: Choices, count: int) -> list[int]:
    """Other ids than the token, no two alike."""
    found: dict[int, None] = {}
    for offset in range(len(choices)):
        if len(found) >= count:
            break
        rival = int(choices[(mixed + offset) % len(choices)])
        if rival != token:
            found[rival] = None
    return list(found)
