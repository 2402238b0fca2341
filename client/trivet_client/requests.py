"""The arguments of the clients' methods as messages of the contract. Raises `InvalidRequestError` for what cannot be sent."""

from collections.abc import Mapping, Sequence

from trivet_proto.v1 import inference_pb2

from trivet_client.errors import invalid
from trivet_client.fields import json_field, set_field, token_ids_field
from trivet_client.messages import AnyTool, Conversation, add_conversation, add_tools, tool_choice_of
from trivet_client.sampling import SamplingParams, params_of


def chat_request(
    messages: Conversation,
    sampling: SamplingParams,
    *,
    model: str | None,
    tools: Sequence[AnyTool],
    tool_choice: str | Mapping[str, object] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, object] | None,
    documents: Sequence[Mapping[str, object]] | None,
    reasoning_effort: str | None,
    request_id: str | None,
) -> inference_pb2.ChatRequest:
    request = inference_pb2.ChatRequest(
        params=params_of(sampling),
        chat_template_kwargs=json_field(chat_template_kwargs, "chat_template_kwargs"),
        documents=json_field(documents, "documents"),
    )
    add_conversation(request, messages)
    add_tools(request, tools)
    set_field(request, "tool_choice", tool_choice_of(tool_choice))
    set_field(request, "model", model)
    set_field(request, "add_generation_prompt", add_generation_prompt)
    set_field(request, "continue_final_message", continue_final_message)
    set_field(request, "chat_template", chat_template)
    set_field(request, "reasoning_effort", reasoning_effort)
    set_field(request, "request_id", request_id)
    return request


def complete_request(
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    model: str | None,
    echo: bool | None,
    add_special_tokens: bool | None,
    request_id: str | None,
) -> inference_pb2.CompleteRequest:
    request = inference_pb2.CompleteRequest(params=params_of(sampling))
    if isinstance(prompt, str):
        set_field(request, "text", prompt, param="prompt")
    else:
        request.token_ids.ids = token_ids_field(prompt, "prompt")
        request.token_ids.SetInParent()  # empty ids are a prompt too, which the server refuses by name
    set_field(request, "model", model)
    set_field(request, "echo", echo)
    set_field(request, "add_special_tokens", add_special_tokens)
    set_field(request, "request_id", request_id)
    return request


def tokenize_request(text: str, *, model: str | None, add_special_tokens: bool | None, with_texts: bool) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(return_token_strings=with_texts)
    set_field(request, "text", text)
    set_field(request, "model", model)
    set_field(request, "add_special_tokens", add_special_tokens)
    return request


def tokenize_chat_request(
    messages: Conversation,
    *,
    model: str | None,
    tools: Sequence[AnyTool],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: Mapping[str, object] | None,
    with_texts: bool,
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(return_token_strings=with_texts)
    request.chat.chat_template_kwargs = json_field(chat_template_kwargs, "chat_template_kwargs")
    request.chat.SetInParent()
    add_conversation(request.chat, messages)
    add_tools(request.chat, tools)
    set_field(request.chat, "add_generation_prompt", add_generation_prompt)
    set_field(request.chat, "continue_final_message", continue_final_message)
    set_field(request, "model", model)
    return request


def detokenize_request(token_ids: Sequence[int], *, model: str | None, skip_special_tokens: bool | None) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(token_ids=token_ids_field(token_ids, "token_ids"))
    set_field(request, "model", model)
    set_field(request, "skip_special_tokens", skip_special_tokens)
    return request


def embed_request(
    inputs: Sequence[str | Sequence[int]], *, model: str | None, dimensions: int | None, normalize: bool | None
) -> inference_pb2.EmbedRequest:
    request = inference_pb2.EmbedRequest()
    if isinstance(inputs, str):
        raise invalid("inputs: a list of texts, or of lists of token ids, is needed", "inputs")
    for each in inputs:
        if isinstance(each, str):
            set_field(request, "texts", [each], param="inputs")
        else:
            request.token_ids.add().ids = token_ids_field(each, "inputs")
    if request.texts and request.token_ids:
        raise invalid("inputs: texts and token ids go in requests of their own, for the order of their vectors", "inputs")
    set_field(request, "model", model)
    set_field(request, "dimensions", dimensions)
    set_field(request, "normalize", normalize)
    return request


def get_model_request(name: str | None) -> inference_pb2.GetModelRequest:
    request = inference_pb2.GetModelRequest()
    set_field(request, "model", name, param="name")
    return request
