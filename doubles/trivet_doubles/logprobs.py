"""Log probabilities that a double reports: made up, but always the same for a token at a position, and in the contract's form."""

from collections.abc import Iterable

from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.v1 import types_pb2

from trivet_doubles.tokens import Choices, hash_of

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
