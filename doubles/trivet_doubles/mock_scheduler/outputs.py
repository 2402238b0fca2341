"""From requests with something new to `StepOutputs`: parallel arrays, prompt logprobs ahead in messages of their own."""

from collections.abc import Iterator, Sequence

from trivet_proto.packing import pack_i32, pack_u8, pack_u32
from trivet_proto.v1 import engine_pb2

from trivet_doubles.logprobs import logprobs_message
from trivet_doubles.mock_scheduler.request import MockRequest
from trivet_doubles.tokens import Choices

PROMPT_TOKENS_PER_MESSAGE = 2000  # 20 logprobs of each stay well under what a stream message may have


def prompt_outputs(requests: Sequence[MockRequest], choices: Choices) -> Iterator[engine_pb2.StepOutputs]:
    """What was asked for of prompts and not yet said; it is said now."""
    for request in requests:
        if not request.reports_prompt or request.error is not None:
            continue
        request.reports_prompt = False
        for first in range(1, len(request.prompt), PROMPT_TOKENS_PER_MESSAGE):
            piece = request.prompt[first : first + PROMPT_TOKENS_PER_MESSAGE].tolist()
            top = request.sampling.prompt_logprobs
            message = logprobs_message(((token, position, top) for position, token in enumerate(piece, first)), choices)
            chunk = engine_pb2.PromptLogprobs(handle=request.handle, first_position=first, logprobs=message)
            yield engine_pb2.StepOutputs(prompt_logprobs=[chunk])


def step_outputs(requests: Sequence[MockRequest], choices: Choices, now: float) -> engine_pb2.StepOutputs:
    """One row for each request; what is new of it counts as said."""
    message = engine_pb2.StepOutputs(
        handles=pack_u32([request.handle for request in requests]),
        token_counts=pack_i32([len(request.fresh) for request in requests]),
        token_ids=pack_i32([token for request in requests for token in request.fresh]),
        finish_reasons=pack_u8([request.finish for request in requests]),
    )
    if any(request.stop_token >= 0 for request in requests):
        message.stop_token_ids = pack_i32([request.stop_token for request in requests])
    _report_starts(message, requests, now)
    _report_logprobs(message, requests, choices)
    message.errors.extend(
        engine_pb2.RowError(handle=request.handle, error=request.error.to_proto()) for request in requests if request.error is not None
    )
    for request in requests:
        request.fresh.clear()
    return message


def _report_starts(message: engine_pb2.StepOutputs, requests: Sequence[MockRequest], now: float) -> None:
    starts = [(row, request) for row, request in enumerate(requests) if request.reports_start and request.error is None]
    if not starts:
        return
    rows = pack_i32([row for row, _ in starts])
    message.first_rows, message.cached_tokens = rows, pack_i32([request.cached_tokens for _, request in starts])
    message.timing.rows, message.timing.queued_us = rows, pack_i32([0] * len(starts))
    message.timing.prefill_us = pack_i32([int((now - request.queued_at) * 1e6) for _, request in starts])
    for _, request in starts:
        request.reports_start = False


def _report_logprobs(message: engine_pb2.StepOutputs, requests: Sequence[MockRequest], choices: Choices) -> None:
    asked = [(row, request) for row, request in enumerate(requests) if request.fresh and request.sampling.HasField("logprobs")]
    if asked:
        message.logprob_rows = pack_i32([row for row, _ in asked])
        tokens = (
            (token, position, request.sampling.logprobs)
            for _, request in asked
            for position, token in enumerate(request.fresh, request.num_tokens - len(request.fresh))
        )
        message.logprobs.CopyFrom(logprobs_message(tokens, choices))
