"""Bodies of the HTTP API to the options that both public APIs share, and the rules that only HTTP has."""

from typing import Any

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.openai.schema import ChatBody, CompletionBody, GenerationBody
from trivet_frontend.serving import ChatInput, CompletionInput, GenerationOptions


def refuse(param: str, message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=param)


def chat_options(body: ChatBody) -> GenerationOptions:
    """Raises `TrivetError` for fields that contradict each other or are not served."""
    _check_shared(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.functions is not None or body.function_call is not None:
        raise refuse("functions", "functions and function_call are not served; use tools and tool_choice")
    newer = body.max_completion_tokens is not None
    return _options(
        body,
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_param="top_logprobs",
        least_max_tokens=1,
    )


def completion_options(body: CompletionBody) -> GenerationOptions:
    """Raises `TrivetError` for fields that contradict each other or are not served."""
    _check_shared(body)
    if body.suffix:
        raise refuse("suffix", "suffix is not served")
    return _options(
        body,
        max_tokens=body.max_tokens,
        max_tokens_param="max_tokens",
        logprobs=body.logprobs,
        logprobs_param="logprobs",
        least_max_tokens=0,
    )


def _options(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    max_tokens_param: str,
    logprobs: int | None,
    logprobs_param: str,
    least_max_tokens: int,
) -> GenerationOptions:
    stop = body.stop if body.stop is not None else []
    return GenerationOptions(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=body.stop_token_ids or (),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=body.logit_bias,
        bad_words=body.bad_words or (),
        allowed_token_ids=body.allowed_token_ids,
        processor_arguments=body.logits_processors_args,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        n=body.n,
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        priority=body.priority,
        cache_salt=body.cache_salt,
        max_tokens_param=max_tokens_param,
        logprobs_param=logprobs_param,
        least_max_tokens=least_max_tokens,
    )


def chat_input(body: ChatBody) -> ChatInput:
    if body.messages is msgspec.UNSET or body.messages is None:
        raise refuse("messages", "messages is required")
    return ChatInput(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        echo=bool(body.echo),
        add_special_tokens=body.add_special_tokens,
    )


def completion_input(body: CompletionBody) -> CompletionInput:
    if body.prompt is msgspec.UNSET or body.prompt is None:
        raise refuse("prompt", "prompt is required")
    return CompletionInput(prompt=body.prompt, echo=bool(body.echo), add_special_tokens=body.add_special_tokens is not False)


def _check_shared(body: GenerationBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refuse("best_of", "best_of must equal n: only what was asked for is generated")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "stream_options needs stream to be true")
    if body.stream and body.prompt_logprobs is not None:
        raise refuse("prompt_logprobs", "prompt_logprobs is not served with stream; ask without stream, or for echo and logprobs")
    if body.structured_outputs is not None:
        raise refuse("structured_outputs", "structured_outputs is not served yet")
    _check_response_format(body.response_format)


def _check_response_format(response_format: Any) -> None:
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise refuse("response_format", f"response_format {kind} is not served yet; only text is")
    raise refuse("response_format", 'response_format must be an object with type "text"')
