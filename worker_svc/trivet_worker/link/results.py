"""A step's result as messages: what would not fit into one is cut."""

import numpy as np
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import worker_pb2

MOST_BYTES = 512 * 1024  # half of what a message of a stream may have: everything else has room beside it
ITEM_BYTES = 4


def split_result(result: worker_pb2.StepResult, most_bytes: int = MOST_BYTES) -> list[worker_pb2.StepResult]:
    """Logprobs can be megabytes: a prompt's go ahead in parts, then come rows with those of their tokens; the last part has all else."""
    parts = [*_prompt_parts(result, most_bytes), *_row_parts(result, most_bytes)]
    if len(parts) == 1:
        return [result]
    for index, part in enumerate(parts):
        part.part.index, part.part.count = index, len(parts)
    return parts


def _prompt_parts(result: worker_pb2.StepResult, most_bytes: int) -> list[worker_pb2.StepResult]:
    """Those that go ahead; none where all fit beside the rest."""
    chunks = list(result.prompt_logprobs)
    if sum(chunk.ByteSize() for chunk in chunks) <= most_bytes:
        return []
    groups: list[list[worker_pb2.PromptLogprobChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.ByteSize() > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.ByteSize()
    return [worker_pb2.StepResult(epoch=result.epoch, step=result.step, prompt_logprobs=group) for group in groups]


def _row_parts(result: worker_pb2.StepResult, most_bytes: int) -> list[worker_pb2.StepResult]:
    """The rows, with what is said once in the last."""
    whole = worker_pb2.StepResult()
    whole.CopyFrom(result)
    if sum(chunk.ByteSize() for chunk in result.prompt_logprobs) > most_bytes:
        del whole.prompt_logprobs[:]
    if result.logprobs.ByteSize() <= most_bytes:
        return [whole]
    rows, counts = unpack_i32(result.logprob_rows), unpack_i32(result.logprobs.counts)
    tokens = unpack_i32(result.token_counts)
    entries_before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    tokens_before = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    scored_before = np.concatenate([[0], np.cumsum(tokens[rows], dtype=np.int64)])  # tokens with logprobs
    parts: list[worker_pb2.StepResult] = []
    first = 0
    while first < len(rows):
        last = first + 1  # one row at least, then as many as fit
        while last < len(rows) and _bytes(entries_before, scored_before, first, last + 1) <= most_bytes:
            last += 1
        begin = int(rows[first]) if parts else 0
        end = int(rows[last]) if last < len(rows) else len(tokens)
        is_last = last == len(rows)
        part = whole if is_last else worker_pb2.StepResult(epoch=result.epoch, step=result.step)
        _put_rows(part, result, begin, end, tokens_before)
        part.logprob_rows = pack_i32(rows[first:last] - begin)
        some, entries = slice(scored_before[first], scored_before[last]), entries_before[scored_before[[first, last]]]
        part.logprobs.counts = pack_i32(counts[some])
        part.logprobs.ranks = pack_i32(unpack_i32(result.logprobs.ranks)[some])
        for name in ("token_ids", "values"):
            setattr(part.logprobs, name, getattr(result.logprobs, name)[entries[0] * ITEM_BYTES : entries[1] * ITEM_BYTES])
        parts.append(part)
        first = last
    return parts


def _bytes(entries_before: np.ndarray, scored_before: np.ndarray, first: int, last: int) -> int:
    return int(entries_before[scored_before[last]] - entries_before[scored_before[first]]) * 2 * ITEM_BYTES


def _put_rows(part: worker_pb2.StepResult, result: worker_pb2.StepResult, begin: int, end: int, tokens_before: np.ndarray) -> None:
    part.handles = result.handles[begin * ITEM_BYTES : end * ITEM_BYTES]
    part.token_counts = result.token_counts[begin * ITEM_BYTES : end * ITEM_BYTES]
    part.token_ids = result.token_ids[tokens_before[begin] * ITEM_BYTES : tokens_before[end] * ITEM_BYTES]
    part.flags = result.flags[begin:end]
