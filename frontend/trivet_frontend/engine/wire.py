"""Session messages to plain values and back.

The only file of this room that knows how arrays are packed. It decides nothing: what is not valid here was refused in the rooms above,
and what a scheduler sends is taken as its word.
"""

from collections.abc import Sequence

import numpy as np
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_f32, pack_i32, pack_u32, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.request import (
    AbortReason,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)

# Prompt ids a message carries at most: half a stream message, which leaves room for everything else in the first part.
PROMPT_IDS_PER_PART = 128 * 1024

_FINISH_REASONS: dict[int, FinishReason | None] = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_ABORT_REASONS = {
    AbortReason.CLIENT_GONE: engine_pb2.ABORT_REASON_CLIENT_GONE,
    AbortReason.DEADLINE: engine_pb2.ABORT_REASON_DEADLINE,
    AbortReason.SLOW_CLIENT: engine_pb2.ABORT_REASON_SLOW_CLIENT,
    AbortReason.DRAINING: engine_pb2.ABORT_REASON_FRONTEND_DRAINING,
    AbortReason.SIBLING_FAILED: engine_pb2.ABORT_REASON_SIBLING_FAILED,
}
_TASK_NAMES = {
    types_pb2.TASK_GENERATE: "generate",
    types_pb2.TASK_EMBED: "embed",
    types_pb2.TASK_CLASSIFY: "classify",
    types_pb2.TASK_SCORE: "score",
    types_pb2.TASK_REWARD: "reward",
}


def add_messages(request: EngineRequest, handles: Sequence[int], *, age_ms: int) -> list[engine_pb2.SessionRequest]:
    """The messages that add `request`: one, or several numbered parts when the prompt is long."""
    ids = np.asarray(request.prompt_ids, dtype=np.int32)
    pieces = [ids[start : start + PROMPT_IDS_PER_PART] for start in range(0, len(ids), PROMPT_IDS_PER_PART)]
    first = engine_pb2.Add(
        handles=pack_u32(handles),
        uid=request.uid,
        request_id=request.request_id,
        task=types_pb2.TASK_GENERATE,
        prompt_token_ids=pack_i32(pieces[0]),
        sampling=_sampling_message(request.sampling),
        seed=request.sampling.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_ms=request.timeout_ms,
        age_ms=age_ms,
    )
    if len(pieces) == 1:
        return [engine_pb2.SessionRequest(add=first)]
    first.part.count = len(pieces)
    rest = [
        engine_pb2.Add(
            handles=first.handles,
            uid=request.uid,
            prompt_token_ids=pack_i32(piece),
            part=types_pb2.Part(index=index, count=len(pieces)),
        )
        for index, piece in enumerate(pieces[1:], start=1)
    ]
    return [engine_pb2.SessionRequest(add=add) for add in (first, *rest)]


def _sampling_message(sampling: SamplingParams) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    # Absent means "no effect"; what has no effect is not sent, so that a plain request is a short message.
    if sampling.top_p != 1.0:
        message.top_p = sampling.top_p
    if sampling.top_k:
        message.top_k = sampling.top_k
    if sampling.min_p:
        message.min_p = sampling.min_p
    if sampling.presence_penalty:
        message.presence_penalty = sampling.presence_penalty
    if sampling.frequency_penalty:
        message.frequency_penalty = sampling.frequency_penalty
    if sampling.repetition_penalty != 1.0:
        message.repetition_penalty = sampling.repetition_penalty
    if sampling.stop_token_ids:
        message.stop_token_ids = pack_i32(sampling.stop_token_ids)
    if sampling.logit_bias:
        message.logit_bias_ids = pack_i32([token for token, _ in sampling.logit_bias])
        message.logit_bias_values = pack_f32([bias for _, bias in sampling.logit_bias])
    if sampling.allowed_token_ids:
        message.allowed_token_ids = pack_i32(sampling.allowed_token_ids)
    if sampling.bad_words:
        message.bad_words_ids = pack_i32([token for word in sampling.bad_words for token in word])
        message.bad_words_counts = pack_i32([len(word) for word in sampling.bad_words])
    return message


def stop_message(handle: int, count: int) -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(stop=engine_pb2.Stop(handles=pack_u32([handle]), counts=pack_i32([count])))


def abort_message(handles: Sequence[int], reason: AbortReason) -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=pack_u32(handles), reason=_ABORT_REASONS[reason]))


def deltas_of(outputs: engine_pb2.StepOutputs) -> list[tuple[int, TokenDelta]]:
    """One delta for each row of a step, in the message's order."""
    handles: list[int] = unpack_u32(outputs.handles).tolist()
    counts: list[int] = unpack_i32(outputs.token_counts).tolist()
    token_ids: list[int] = unpack_i32(outputs.token_ids).tolist()
    stops: list[int] = unpack_i32(outputs.stop_token_ids).tolist() if outputs.stop_token_ids else []
    rows: list[tuple[int, TokenDelta]] = []
    start = 0
    for row, handle in enumerate(handles):
        end = start + counts[row]
        delta = TokenDelta(token_ids=token_ids[start:end], finish_reason=_FINISH_REASONS.get(outputs.finish_reasons[row]))
        if stops and stops[row] >= 0:
            delta.stop_token_id = stops[row]
        rows.append((handle, delta))
        start = end
    if outputs.first_rows:
        for row, cached in zip(unpack_i32(outputs.first_rows).tolist(), unpack_i32(outputs.cached_tokens).tolist(), strict=True):
            rows[row][1].cached_tokens = cached
    if outputs.logprob_rows:
        _attach_logprobs(rows, counts, outputs)
    if outputs.prompt_logprobs:
        by_handle = dict(rows)
        for prompt in outputs.prompt_logprobs:
            delta = by_handle.get(prompt.handle) or TokenDelta()
            if prompt.handle not in by_handle:
                by_handle[prompt.handle] = delta
                # A chunk of a prompt still being computed has no row of its own; it comes before whatever follows.
                rows.append((prompt.handle, delta))
            block = logprobs_of(prompt.logprobs)
            if delta.prompt_logprobs is None:
                delta.prompt_logprobs = block
            else:
                delta.prompt_logprobs.extend(block)
    return rows


def _attach_logprobs(rows: list[tuple[int, TokenDelta]], counts: list[int], outputs: engine_pb2.StepOutputs) -> None:
    block = logprobs_of(outputs.logprobs)
    start = 0
    for row in unpack_i32(outputs.logprob_rows).tolist():
        end = start + counts[row]
        rows[row][1].logprobs = TokenLogprobs(
            token_ids=block.token_ids[start:end], values=block.values[start:end], ranks=block.ranks[start:end]
        )
        start = end


def logprobs_of(message: types_pb2.Logprobs) -> TokenLogprobs:
    counts: list[int] = unpack_i32(message.counts).tolist()
    token_ids: list[int] = unpack_i32(message.token_ids).tolist()
    values: list[float] = unpack_f32(message.values).tolist()
    block = TokenLogprobs(ranks=unpack_i32(message.ranks).tolist())
    start = 0
    for count in counts:
        block.token_ids.append(token_ids[start : start + count])
        block.values.append(values[start : start + count])
        start += count
    return block


def errors_of(outputs: engine_pb2.StepOutputs) -> list[tuple[int, TrivetError]]:
    return [(row.handle, TrivetError.from_proto(row.error)) for row in outputs.errors]


def model_of(card: types_pb2.ModelCard) -> ModelDescription:
    tasks = tuple(_TASK_NAMES[task] for task in card.tasks if task in _TASK_NAMES)
    return ModelDescription(
        name=card.name,
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        eos_token_ids=tuple(unpack_i32(card.eos_token_ids).tolist()),
        fingerprint=card.fingerprint.SerializeToString(deterministic=True),
        bundle_digest=card.bundle_sha256,
        max_logprobs=card.max_logprobs,
        # A card that lists no task at all speaks for a plain language model.
        generates=not tasks or "generate" in tasks,
        tasks=tasks or ("generate",),
        aliases=tuple(card.aliases),
    )


def load_of(message: engine_pb2.Load) -> LoadReport:
    return LoadReport(
        requests_running=message.requests_running,
        requests_waiting=message.requests_waiting,
        waiting_uncached_tokens=message.waiting_uncached_tokens,
        kv_cache_usage=message.kv_cache_usage,
        replicas_ready=message.replicas_ready,
        blocks_in_use=message.blocks_in_use,
        blocks_total=message.blocks_total,
        preemptions_total=message.preemptions_total,
        prefix_cache_queries_total=message.prefix_cache_queries_total,
        prefix_cache_hits_total=message.prefix_cache_hits_total,
        steps_total=message.steps_total,
        prompt_tokens_total=message.prompt_tokens_total,
        generation_tokens_total=message.generation_tokens_total,
        paused=message.paused,
    )


def lost_error() -> TrivetError:
    """What a client sees when its scheduler is gone: no addresses of ours."""
    message = "the service that computed this answer went away or is shutting down before it was finished; try again"
    return TrivetError(ErrorKind.UNAVAILABLE, message, retryable=True)
