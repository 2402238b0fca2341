"""Session messages to plain values and back.

The only file of this room that knows how arrays are packed. What goes up was found valid in the rooms above; what a scheduler sends is
read as a whole before anything of it counts, and what contradicts itself is refused.
"""

from collections.abc import Sequence

import numpy as np
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
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
from trivet_frontend.engine.submission import Submission
from trivet_frontend.engine.token_stream import TokenStream

# Prompt ids a message carries at most: half a stream message, which leaves room for everything else in the first part.
PROMPT_IDS_PER_PART = 128 * 1024
# For the tags and lengths around what is counted.
MESSAGE_MARGIN_BYTES = 256

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
    AbortReason.MOVED: engine_pb2.ABORT_REASON_UNSPECIFIED,
}
_TASK_NAMES = {
    types_pb2.TASK_GENERATE: "generate",
    types_pb2.TASK_EMBED: "embed",
    types_pb2.TASK_CLASSIFY: "classify",
    types_pb2.TASK_SCORE: "score",
    types_pb2.TASK_REWARD: "reward",
}


def add_messages(submission: Submission, handles: Sequence[int], *, age_ms: int, timeout_ms: int | None) -> list[engine_pb2.SessionRequest]:
    """The messages that add a request, or take it up where another scheduler left it: one, or several numbered parts for a long prompt.

    Raises TOO_LARGE when what goes with the prompt fills a message by itself.
    """
    request = submission.request
    first = engine_pb2.Add(
        handles=pack_u32(handles),
        uid=request.uid,
        request_id=request.request_id,
        task=types_pb2.TASK_GENERATE,
        sampling=_sampling_message(request.sampling),
        seed=request.sampling.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_ms=timeout_ms,
        age_ms=age_ms,
        resume=[] if submission.is_fresh else [_resume_message(request, stream) for stream in submission.streams],
    )
    room = (MAX_STREAM_MESSAGE_BYTES - MESSAGE_MARGIN_BYTES - first.ByteSize()) // 4
    if room < 0:
        raise TrivetError(ErrorKind.TOO_LARGE, "the request without its prompt is larger than a message between services may be")
    ids = np.asarray(request.prompt_ids, dtype=np.int32)
    begin = min(room, PROMPT_IDS_PER_PART)
    first.prompt_token_ids = pack_i32(ids[:begin])
    pieces = [ids[start : start + PROMPT_IDS_PER_PART] for start in range(begin, len(ids), PROMPT_IDS_PER_PART)]
    if not pieces:
        return [engine_pb2.SessionRequest(add=first)]
    count = 1 + len(pieces)
    first.part.count = count
    rest = [
        engine_pb2.Add(
            handles=first.handles,
            uid=request.uid,
            prompt_token_ids=pack_i32(piece),
            part=types_pb2.Part(index=index, count=count),
        )
        for index, piece in enumerate(pieces, start=1)
    ]
    return [engine_pb2.SessionRequest(add=add) for add in (first, *rest)]


def _resume_message(request: EngineRequest, stream: TokenStream) -> engine_pb2.ResumeState:
    wishes_prompt = request.sampling.prompt_logprobs is not None
    return engine_pb2.ResumeState(
        output_token_ids=pack_i32(stream.delivered),
        done=stream.ended,
        # All of them come before the first token; what came of an unfinished report is dropped by the stream when it comes again.
        prompt_logprobs_reported=wishes_prompt and (bool(stream.delivered) or stream.prompt_rows >= len(request.prompt_ids) - 1),
        cached_tokens_reported=stream.has_cached_tokens,
        timing_reported=bool(stream.delivered),
    )


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
    if sampling.processor_arguments:
        message.extra = sampling.processor_arguments
    return message


def stop_message(handle: int, count: int) -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(stop=engine_pb2.Stop(handles=pack_u32([handle]), counts=pack_i32([count])))


def abort_message(handles: Sequence[int], reason: AbortReason) -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=pack_u32(handles), reason=_ABORT_REASONS[reason]))


def deltas_of(outputs: engine_pb2.StepOutputs, *, vocab_size: int) -> list[tuple[int, TokenDelta]]:
    """One delta for each row of a step, in the message's order; raises INVALID_ARGUMENT for a message that contradicts itself."""
    # Lists, not arrays: for as few rows as a step has, numpy's fixed costs were a sixth of all that the frontend takes for a message.
    handles: list[int] = unpack_u32(outputs.handles, "handles").tolist()
    counts: list[int] = unpack_i32(outputs.token_counts, "token_counts").tolist()
    token_ids: list[int] = unpack_i32(outputs.token_ids).tolist()
    stops: list[int] = unpack_i32(outputs.stop_token_ids, "stop_token_ids").tolist()
    finishes = outputs.finish_reasons
    _expect(len(counts) == len(handles) == len(finishes), "rows of different numbers")
    _expect(min(counts, default=0) >= 0, "a count below zero")
    _expect(sum(counts) == len(token_ids), "token counts that do not add up to the tokens")
    _expect(min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size, "a token beyond the vocabulary")
    _expect(len(stops) in (0, len(handles)), "stop tokens of another number than the rows")
    _expect(_FINISH_REASONS.keys() >= set(finishes), "an unknown reason to finish")
    rows: list[tuple[int, TokenDelta]] = []
    start = 0
    for row, (handle, count, finish) in enumerate(zip(handles, counts, finishes, strict=True)):
        delta = TokenDelta(token_ids=token_ids[start : start + count], finish_reason=_FINISH_REASONS[finish])
        if stops and stops[row] >= 0:
            delta.stop_token_id = stops[row]
        rows.append((handle, delta))
        start += count
    by_handle = dict(rows)
    _expect(len(by_handle) == len(rows), "a handle with two rows")
    if outputs.first_rows:
        for row, cached in _pairs(outputs.first_rows, outputs.cached_tokens, len(rows)):
            rows[row][1].cached_tokens = cached
    if outputs.logprob_rows:
        _attach_logprobs(rows, outputs)
    for prompt in outputs.prompt_logprobs:
        if prompt.handle not in by_handle:
            # A chunk of a prompt still being computed has no row of its own.
            by_handle[prompt.handle] = TokenDelta()
            rows.append((prompt.handle, by_handle[prompt.handle]))
        _attach_prompt_logprobs(by_handle[prompt.handle], prompt)
    return rows


def _attach_logprobs(rows: list[tuple[int, TokenDelta]], outputs: engine_pb2.StepOutputs) -> None:
    block = logprobs_of(outputs.logprobs)
    start = 0
    for row in unpack_i32(outputs.logprob_rows, "logprob_rows").tolist():
        _expect(0 <= row < len(rows), "logprobs of a row that is not there")
        delta = rows[row][1]
        end = start + len(delta.token_ids)
        delta.logprobs = TokenLogprobs(token_ids=block.token_ids[start:end], values=block.values[start:end], ranks=block.ranks[start:end])
        start = end
    _expect(start == len(block.ranks), "logprobs that do not match their tokens")


def _attach_prompt_logprobs(delta: TokenDelta, prompt: engine_pb2.PromptLogprobs) -> None:
    block = logprobs_of(prompt.logprobs)
    _expect(prompt.first_position > 0, "logprobs of a prompt's first token")
    if delta.prompt_logprobs is None:
        delta.prompt_logprobs, delta.prompt_position = block, prompt.first_position
        return
    _expect(prompt.first_position == delta.prompt_position + len(delta.prompt_logprobs.ranks), "prompt logprobs with a gap")
    delta.prompt_logprobs.extend(block)


def logprobs_of(message: types_pb2.Logprobs) -> TokenLogprobs:
    counts: list[int] = unpack_i32(message.counts, "logprobs.counts").tolist()
    token_ids: list[int] = unpack_i32(message.token_ids, "logprobs.token_ids").tolist()
    values: list[float] = unpack_f32(message.values, "logprobs.values").tolist()
    block = TokenLogprobs(ranks=unpack_i32(message.ranks, "logprobs.ranks").tolist())
    _expect(len(block.ranks) == len(counts), "logprobs with another number of ranks")
    start = 0
    for count in counts:
        _expect(count > 0, "a logprob row without its token")
        block.token_ids.append(token_ids[start : start + count])
        block.values.append(values[start : start + count])
        start += count
    _expect(start == len(token_ids) == len(values), "logprob counts that do not add up")
    return block


def _pairs(rows: bytes, values: bytes, count: int) -> list[tuple[int, int]]:
    places: list[int] = unpack_i32(rows, "first_rows").tolist()
    found: list[int] = unpack_i32(values, "cached_tokens").tolist()
    _expect(len(places) == len(found) and all(0 <= place < count for place in places), "cached tokens of a row that is not there")
    return list(zip(places, found, strict=True))


def _expect(holds: bool, otherwise: str, /) -> None:
    if not holds:
        raise invalid(f"the scheduler sent {otherwise}")


def errors_of(outputs: engine_pb2.StepOutputs) -> dict[int, TrivetError]:
    """By handle."""
    return {row.handle: TrivetError.from_proto(row.error) for row in outputs.errors}


def model_of(card: types_pb2.ModelCard) -> ModelDescription:
    """Raises INVALID_ARGUMENT for a card that describes no model."""
    _expect(
        bool(card.name) and 0 < card.vocab_size < 2**31 and 0 < card.max_model_len < 2**31,
        "a model card without name, vocabulary or context",
    )
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
        last_step_age_ms=message.last_step_age_ms if message.HasField("last_step_age_ms") else None,
        paused=message.paused,
    )


def lost_error() -> TrivetError:
    """What a client sees when its scheduler is gone: no addresses of ours."""
    message = "the service that computed this answer went away or is shutting down before it was finished; try again"
    return TrivetError(ErrorKind.UNAVAILABLE, message, retryable=True)
