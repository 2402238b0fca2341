"""Messages of the public gRPC API to the shared forms and back. Nothing is judged here but what cannot be read."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import inference_pb2, types_pb2

from trivet_frontend.serving import ChatInput, ChoiceDelta, CompletionInput, GenerationOptions, ServedModel, TokenLogprob, Usage

PROMPT_ROWS_PER_EVENT = 512

_SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "n",
    "priority",
    "cache_salt",
)
_TASKS = {
    "generate": types_pb2.TASK_GENERATE,
    "embed": types_pb2.TASK_EMBED,
    "classify": types_pb2.TASK_CLASSIFY,
    "score": types_pb2.TASK_SCORE,
    "reward": types_pb2.TASK_REWARD,
}


def refuse(param: str, message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=param)


def options_of(params: inference_pb2.GenerationParams, *, least_max_tokens: int) -> GenerationOptions:
    """The options in `params`; raises `TrivetError` for what is not served."""
    if params.structured_output.WhichOneof("constraint") is not None:
        raise refuse("structured_output", "structured_output is not served yet")
    said: dict[str, Any] = {field.name: value for field, value in params.ListFields() if field.name in _SCALARS}
    return GenerationOptions(
        **said,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        logit_bias={str(entry.token_id): entry.bias for entry in params.logit_bias} or None,
        bad_words=tuple(params.bad_words),
        allowed_token_ids=tuple(params.allowed_token_ids) or None,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=(params.spaces_between_special_tokens if params.HasField("spaces_between_special_tokens") else True),
        least_max_tokens=least_max_tokens,
    )


def chat_of(request: inference_pb2.ChatRequest) -> ChatInput:
    return ChatInput(
        messages=[_message_of(message) for message in request.messages],
        tools=_tools_of(request.tools),
        tool_choice=_tool_choice_of(request.tool_choice),
        documents=_json_list(request.documents, "documents"),
        add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else None,
        continue_final_message=request.continue_final_message if request.HasField("continue_final_message") else None,
        chat_template=request.chat_template or None,
        chat_template_kwargs=_json_object(request.chat_template_kwargs, "chat_template_kwargs"),
        reasoning_effort=request.reasoning_effort or None,
    )


def tokenized_chat_of(chat: inference_pb2.ChatMessages) -> ChatInput:
    return ChatInput(
        messages=[_message_of(message) for message in chat.messages],
        tools=_tools_of(chat.tools),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        continue_final_message=chat.continue_final_message if chat.HasField("continue_final_message") else None,
        chat_template_kwargs=_json_object(chat.chat_template_kwargs, "chat_template_kwargs"),
    )


def completion_of(request: inference_pb2.CompleteRequest) -> CompletionInput:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise refuse("prompt", "prompt is required")
    prompt = request.text if kind == "text" else unpack_i32(request.token_ids.ids, "token_ids").tolist()
    return CompletionInput(
        prompt=prompt,
        echo=request.echo,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
    )


def _message_of(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    parts = [_part_of(part) for part in message.content]
    plain: dict[str, Any] = {"role": message.role, "content": parts or None}
    # One text is a string to a template; more stay parts, joined by the same rule as on HTTP.
    if len(parts) == 1 and parts[0]["type"] == "text":
        plain["content"] = parts[0]["text"]
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name or None, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return plain


def _part_of(part: inference_pb2.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part")
    if kind == "text":
        return {"type": "text", "text": part.text}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    if kind is None:
        return {"type": ""}
    # The model's modalities are judged with the parts of HTTP.
    media = {"image": "image_url", "audio": "audio_url", "video": "video_url"}[kind]
    return {"type": media, media: {"url": getattr(part, kind).url}}


def _tools_of(tools: Sequence[inference_pb2.Tool]) -> list[dict[str, Any]] | None:
    plain = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": _json_object(tool.parameters, "tools") or {}}
        if tool.description:
            function["description"] = tool.description
        if tool.HasField("strict"):
            function["strict"] = tool.strict
        plain.append({"type": "function", "function": function})
    return plain or None


def _tool_choice_of(choice: str) -> Any:
    if choice in ("", "none", "auto", "required"):
        return choice or None
    return {"type": "function", "function": {"name": choice}}


def _json_object(text: str, param: str) -> dict[str, Any] | None:
    return _json(text, param, dict[str, Any], "object") if text else None


def _json_list(text: str, param: str) -> list[dict[str, Any]] | None:
    return _json(text, param, list[dict[str, Any]], "list of objects") if text else None


def _json(text: str, param: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refuse(param, f"{param} must be a JSON {name}: {error}") from None


# ---- answers ----


def text_event(delta: ChoiceDelta, *, with_ids: bool) -> inference_pb2.GenerationEvent:
    text = inference_pb2.TextDelta(text=delta.text)
    if with_ids:
        text.token_ids = pack_i32(delta.token_ids)
    text.logprobs.extend(_logprob(row) for row in delta.logprobs or ())
    return inference_pb2.GenerationEvent(index=delta.index, text=text)


def prompt_events(delta: ChoiceDelta) -> Iterator[inference_pb2.GenerationEvent]:
    """The prompt's logprobs in pieces: those of a long prompt exceed what a stream's message should hold."""
    rows = [row for row in delta.prompt_logprobs or () if row is not None]
    for start in range(0, len(rows), PROMPT_ROWS_PER_EVENT):
        piece = [_logprob(row) for row in rows[start : start + PROMPT_ROWS_PER_EVENT]]
        report = inference_pb2.PromptReport(logprobs=piece, first_position=start + 1)
        yield inference_pb2.GenerationEvent(index=delta.index, prompt=report)


def finished_event(delta: ChoiceDelta, usage: Usage) -> inference_pb2.GenerationEvent:
    finished = inference_pb2.Finished(
        finish_reason=delta.finish_reason or "",
        stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens
        ),
    )
    return inference_pb2.GenerationEvent(index=delta.index, finished=finished)


def _logprob(row: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token=row.token,
        token_id=row.token_id,
        logprob=row.logprob or 0.0,
        rank=row.rank or 0,
        token_bytes=row.token_bytes,
        top=[_logprob(top) for top in row.top],
    )


def public_model(model: ServedModel, name: str) -> inference_pb2.PublicModel:
    return inference_pb2.PublicModel(
        name=name,
        max_model_len=model.description.max_model_len,
        vocab_size=model.description.vocab_size,
        tasks=[_TASKS[task] for task in model.description.tasks],
        created=model.created,
    )
