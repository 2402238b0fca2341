"""A step, read and held against what the worker holds, before anything of it is applied.

What is wrong here means that scheduler and worker no longer agree. Nothing has changed then, but what the step told is missing too, so no
later step can be trusted: whoever called ends the epoch. Pure: it reads the batch and changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import split_ragged, unpack_i32, unpack_u32
from trivet_proto.v1 import worker_pb2

from trivet_worker.runner.batch import NewWork, PersistentBatch
from trivet_worker.runner.limits import MOST_ITERATIONS, RunnerLimits

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step that can be applied as a whole. Arrays over rows hold new requests first, then known ones."""

    finished: list[int]
    blocks_to_zero: Ints
    copy_sources: Ints
    copy_targets: Ints
    new: list[NewWork]
    known_handles: NDArray[np.uint32]
    known_slots: list[int]
    new_blocks: list[tuple[int, NDArray[np.int32]]]  # slot, blocks to append
    computed: Ints
    scheduled: Ints
    iterations: int  # at most


def check_step(step: worker_pb2.Step, batch: PersistentBatch, limits: RunnerLimits, *, num_blocks: int, is_skipped: bool) -> CheckedStep:
    """Raises ABORTED or INVALID_ARGUMENT for a step that does not hold together, UNIMPLEMENTED for what was not offered.

    `is_skipped`: steps behind a failed one speak of tokens that were never sampled.
    """
    _refuse_what_was_not_offered(step)
    finished = unpack_u32(step.finished_handles, "finished_handles").tolist()
    gone = set(finished)
    new = _new_work(step, batch, gone, num_blocks)
    handles = unpack_u32(step.known.handles, "known.handles")
    slots = _known_slots(handles, batch, gone)
    computed, scheduled = _work_of_known(step.known, len(slots))
    counts, added = _added_blocks(step.known, len(slots), num_blocks)
    iterations = max(1, step.run_ahead)
    _check_iterations(step, scheduled, iterations)
    at = np.array(slots, dtype=np.int64)
    if not is_skipped:
        computed = _true_counts(batch, at, computed, scheduled)
    _check_reach(batch, handles, at, computed, scheduled, counts, iterations, is_skipped=is_skipped)
    sources = _blocks(step.copy_sources, "copy_sources", num_blocks, first=0)
    targets = _blocks(step.copy_targets, "copy_targets", num_blocks, first=1)
    if len(sources) != len(targets):
        raise _disagree(f"{len(sources)} blocks are to be copied to {len(targets)}")
    whole = CheckedStep(
        finished=finished,
        blocks_to_zero=_blocks(step.blocks_to_zero, "blocks_to_zero", num_blocks, first=0),
        copy_sources=sources,
        copy_targets=targets,
        new=new,
        known_handles=handles,
        known_slots=slots,
        new_blocks=[(slot, blocks) for slot, blocks in zip(slots, added, strict=True) if len(blocks)] if len(added) else [],
        computed=np.concatenate([_ints(request.num_computed_tokens for request in step.new_requests), computed]),
        scheduled=np.concatenate([_ints(request.num_scheduled_tokens for request in step.new_requests), scheduled]),
        iterations=iterations,
    )
    if whole.scheduled.sum() > limits.max_num_batched_tokens:
        raise _disagree(f"it has {whole.scheduled.sum()} tokens, this worker takes {limits.max_num_batched_tokens} in a step")
    return whole


def _refuse_what_was_not_offered(step: worker_pb2.Step) -> None:
    known = step.known
    for name, is_there in (
        ("masks", step.masked_handles),
        ("drafts", known.draft_counts or known.draft_token_ids),
        ("encoder inputs", step.encoder_inputs or step.encoder_outputs_to_free),
        ("KV transfers", step.connectors),
        ("adapters", any(request.adapter for request in step.new_requests)),
        ("media", any(request.media for request in step.new_requests)),
        ("prompt embeddings", any(request.prompt_embeds_sha256 for request in step.new_requests)),
    ):
        if is_there:
            raise TrivetError(ErrorKind.UNIMPLEMENTED, f"the step wants {name}, which this worker did not offer")


# ---- new requests ----


def _new_work(step: worker_pb2.Step, batch: PersistentBatch, gone: set[int], num_blocks: int) -> list[NewWork]:
    if not step.new_requests:
        return []
    seen: set[int] = set()
    for request in step.new_requests:
        if request.handle in seen or (request.handle not in gone and batch.slot_of(request.handle) is not None):
            raise _disagree(f"request {request.handle} is new but held already")
        seen.add(request.handle)
    room = batch.num_free + sum(batch.slot_of(handle) is not None for handle in gone)
    if len(seen) > room:
        raise _disagree(f"{len(seen)} requests are new, there is room for {room}")
    return [_checked_request(request, batch, num_blocks) for request in step.new_requests]


def _checked_request(request: worker_pb2.NewRequest, batch: PersistentBatch, num_blocks: int) -> NewWork:
    ids = unpack_i32(request.token_ids, "token_ids")
    who = f"request {request.handle}"
    if not 0 < len(ids) <= batch.max_model_len:
        raise _disagree(f"{who} has {len(ids)} tokens, this worker takes 1 to {batch.max_model_len}")
    if ids.min() < 0 or ids.max() >= batch.vocab_size:
        raise _disagree(f"{who} has a token outside the vocabulary of {batch.vocab_size}")
    if not 0 < request.num_prompt_tokens <= len(ids):
        raise _disagree(f"{who} has a prompt of {request.num_prompt_tokens} among {len(ids)} tokens")
    reach = request.num_computed_tokens + request.num_scheduled_tokens
    if request.num_scheduled_tokens < 1 or reach > len(ids):
        raise _disagree(f"{who} is to run to token {reach} of {len(ids)}")
    blocks = _blocks(request.block_ids, "block_ids", num_blocks, first=0).astype(np.int32)
    counts = unpack_i32(request.block_counts, "block_counts")
    if counts.size and (counts.size != 1 or int(counts[0]) != len(blocks)):
        raise _disagree(f"{who} has {len(blocks)} blocks in groups of {counts.tolist()}, this worker has one group")
    if not reach <= len(blocks) * batch.block_size or len(blocks) > batch.most_blocks:
        raise _disagree(f"{who} is to run to token {reach} with {len(blocks)} blocks of {batch.block_size}")
    extras = batch.sampling.extras_of(request.sampling, request.eos_token_ids)
    return NewWork(request, ids, blocks, extras, _stop_ids(request))


def _stop_ids(request: worker_pb2.NewRequest) -> frozenset[int]:
    """What ends it, as far as can be known here; the scheduler decides, so arrays that do not hold together do no harm."""
    arrays = [request.sampling.stop_token_ids, *([] if request.sampling.ignore_eos else [request.eos_token_ids])]
    return frozenset(token for data in arrays if not len(data) % 4 for token in unpack_i32(data).tolist())


# ---- known requests ----


def _known_slots(handles: NDArray[np.uint32], batch: PersistentBatch, gone: set[int]) -> list[int]:
    slots = []
    for handle in handles.tolist():
        slot = batch.slot_of(handle)
        if slot is None or handle in gone:
            raise _disagree(f"it names request {handle}, which this worker does not hold")
        slots.append(slot)
    if len(set(slots)) != len(slots):
        raise _disagree("it names a request twice")
    return slots


def _work_of_known(known: worker_pb2.KnownRequests, count: int) -> tuple[Ints, Ints]:
    computed, scheduled = unpack_i32(known.num_computed_tokens, "computed"), unpack_i32(known.num_scheduled_tokens, "scheduled")
    if len(computed) != count or len(scheduled) != count:
        raise _disagree(f"{count} known requests have {len(computed)} counts of tokens computed and {len(scheduled)} scheduled")
    if count and (computed.min() < 0 or scheduled.min() < 1):
        raise _disagree("a known request has a negative count of tokens computed, or none to run")
    return computed.astype(np.int64), scheduled.astype(np.int64)


def _added_blocks(known: worker_pb2.KnownRequests, count: int, num_blocks: int) -> tuple[Ints, list[NDArray[np.int32]]]:
    """How many blocks each row gets, and which; the second is empty where none gets any."""
    counts = unpack_i32(known.new_block_counts, "known.new_block_counts")
    if not counts.size and not known.new_block_ids:
        return np.zeros(count, dtype=np.int64), []
    if len(counts) != count:
        raise _disagree(f"{count} known requests have {len(counts)} counts of new blocks")
    ids = _blocks(known.new_block_ids, "known.new_block_ids", num_blocks, first=0).astype(np.int32)
    added = list(split_ragged(ids, counts, "known.new_block_ids"))
    return counts.astype(np.int64), added if ids.size else []


def _check_iterations(step: worker_pb2.Step, scheduled: Ints, iterations: int) -> None:
    if iterations > MOST_ITERATIONS:
        raise _disagree(f"it has {iterations} iterations, this worker runs {MOST_ITERATIONS} from one step")
    if iterations > 1 and (step.new_requests or (scheduled != 1).any()):
        raise _disagree("several iterations are of decodes alone")


def _true_counts(batch: PersistentBatch, slots: Ints, computed: Ints, scheduled: Ints) -> Ints:
    """Tokens computed of each row. A step behind one of several iterations is built as if all of them had run."""
    beyond = computed + scheduled - batch.num_tokens[slots]
    is_told_of = (beyond > 0) & (scheduled == 1) & (beyond <= batch.left_out[slots])
    return np.where(is_told_of & ~batch.is_broken[slots], computed - beyond, computed)


def _check_reach(
    batch: PersistentBatch,
    handles: NDArray[np.uint32],
    slots: Ints,
    computed: Ints,
    scheduled: Ints,
    counts: Ints,
    iterations: int,
    *,
    is_skipped: bool,
) -> None:
    """Each known request runs over tokens that are there, into blocks that it has."""
    blocks, reach = batch.num_blocks[slots] + counts, computed + scheduled
    last = reach + (iterations - 1)
    # A request whose logits were not finite has no next token, and the step behind it doesn't know that yet; nobody waits for its result.
    beyond = (reach > batch.num_tokens[slots]) & ~batch.is_broken[slots]
    bad = (last > blocks * batch.block_size) | (blocks > batch.most_blocks) | (last > batch.max_model_len)
    if iterations > 1:
        bad |= (reach < batch.num_tokens[slots]) | ~batch.samples[slots]
    if not is_skipped:
        bad |= beyond
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        has = f"{batch.num_tokens[slots[row]]} tokens and {blocks[row]} blocks of {batch.block_size}"
        raise _disagree(f"request {handles[row]} is to run to token {last[row]}; it has {has}")


def _blocks(data: bytes, name: str, num_blocks: int, *, first: int) -> Ints:
    ids = unpack_i32(data, name)
    if ids.size and (ids.min() < first or ids.max() >= num_blocks):
        raise _disagree(f"{name} names a block outside {first} to {num_blocks - 1}")
    return ids.astype(np.int64)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _disagree(what: str) -> TrivetError:
    return TrivetError(ErrorKind.ABORTED, f"the step does not fit what this worker holds: {what}")
