"""Conversations: messages and tools, typed or as the dicts of the OpenAI API, into their wire form.

Whether a model takes a part or a tool is the server's to say; here only what has no place on the wire is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trivet_proto.v1 import inference_pb2

from trivet_client.errors import invalid
from trivet_client.fields import json_field, set_field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is a text, or parts as the OpenAI API has them (`{"type": "text", "text": …}`)."""

    role: str
    content: str | Sequence[Mapping[str, object]] | None = None
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool | None = None


AnyMessage = Message | Mapping[str, object]
AnyTool = Tool | Mapping[str, object]
Conversation = str | Sequence[AnyMessage]
"""Messages in order; a text alone is one message of the user."""

_MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"}
_MEDIA = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


def add_conversation(messages: "inference_pb2.ChatRequest | inference_pb2.ChatMessages", conversation: Conversation) -> None:
    """Append to `messages.messages`. Raises `InvalidRequestError` that names the message."""
    given = [Message("user", conversation)] if isinstance(conversation, str) else conversation
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise invalid("messages: a list of messages is needed, or one text", "messages")
    for index, each in enumerate(given):
        _fill(messages.messages.add(), each, f"messages[{index}]")


def add_tools(request: "inference_pb2.ChatRequest | inference_pb2.ChatMessages", tools: Sequence[AnyTool]) -> None:
    """Append to `request.tools`. Raises `InvalidRequestError` that names the tool."""
    for index, each in enumerate(tools):
        where = f"tools[{index}]"
        tool = each if isinstance(each, Tool) else _tool_of(each, where)
        wire = request.tools.add()
        set_field(wire, "name", tool.name, param=f"{where}.name")
        set_field(wire, "description", tool.description, param=f"{where}.description")
        set_field(wire, "parameters", json_field(tool.parameters, f"{where}.parameters"))
        set_field(wire, "strict", tool.strict, param=f"{where}.strict")


def tool_choice_of(choice: str | Mapping[str, object] | None) -> str:
    """A tool's name, `none`, `auto` or `required`; the OpenAI API's object for one function as well. Empty: the server's default."""
    if choice is None or isinstance(choice, str):
        return choice or ""
    name = _mapping(choice.get("function"), "tool_choice.function").get("name")
    if not isinstance(name, str):
        raise invalid("tool_choice.function.name: the tool's name is needed", "tool_choice")
    return name


def _fill(wire: inference_pb2.ChatMessage, message: AnyMessage, where: str) -> None:
    if isinstance(message, Message):
        fields: Mapping[str, object] = {
            "role": message.role,
            "content": message.content,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning_content,
        }
        calls = list(message.tool_calls)
    else:
        fields = _mapping(message, where)
        unknown = sorted(map(str, set(fields) - _MESSAGE_FIELDS))
        if unknown:
            raise invalid(f"{where} has no field {unknown[0]!r}; known are {', '.join(sorted(_MESSAGE_FIELDS))}", where)
        calls = [_tool_call_of(each, f"{where}.tool_calls") for each in _list(fields.get("tool_calls"), f"{where}.tool_calls")]
    for name in ("role", "name", "tool_call_id"):
        set_field(wire, name, fields.get(name), param=f"{where}.{name}")
    set_field(wire, "reasoning_content", fields.get("reasoning_content") or fields.get("reasoning"), param=f"{where}.reasoning_content")
    _fill_content(wire, fields.get("content"), f"{where}.content")
    if fields.get("refusal") is not None:
        set_field(wire.content.add(), "refusal", fields["refusal"], param=f"{where}.refusal")
    for call in calls:
        entry = wire.tool_calls.add()
        for name in ("id", "name", "arguments"):
            set_field(entry, name, getattr(call, name), param=f"{where}.tool_calls")


def _fill_content(wire: inference_pb2.ChatMessage, content: object, where: str) -> None:
    if isinstance(content, str):
        set_field(wire.content.add(), "text", content, param=where)
        return
    parts = list(_list(content, where))
    if content is not None and not parts:
        wire.content.add().text = ""  # no parts are an empty text; nothing on the wire is a message without content
    for index, each in enumerate(parts):
        _fill_part(wire.content.add(), _mapping(each, f"{where}[{index}]"), f"{where}[{index}]")


def _fill_part(wire: inference_pb2.ContentPart, part: Mapping[str, object], where: str) -> None:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(str(kind))
        if not isinstance(text, str):
            raise invalid(f"{where}.{kind}: a text is needed", where)
        set_field(wire, str(kind), text, param=where)
    elif isinstance(kind, str) and kind in _MEDIA:
        media = getattr(wire, _MEDIA[kind])
        set_field(media, "url", _mapping(part.get(kind), f"{where}.{kind}").get("url"), param=f"{where}.{kind}.url")
        set_field(media, "uuid", part.get("uuid"), param=f"{where}.uuid")
    else:
        raise invalid(f"{where}.type is {kind!r}; known are text, refusal, {', '.join(_MEDIA)}", where)


def _tool_of(given: Mapping[str, object], where: str) -> Tool:
    function = _mapping(_mapping(given, where).get("function"), f"{where}.function")
    parameters, strict = function.get("parameters"), function.get("strict")
    return Tool(
        name=_text(function, "name", where),
        description=_text(function, "description", where),
        parameters=None if parameters is None else _mapping(parameters, f"{where}.function.parameters"),
        strict=None if strict is None else bool(strict),
    )


def _tool_call_of(given: object, where: str) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    call = _mapping(given, where)
    function = _mapping(call.get("function"), f"{where}.function")
    return ToolCall(id=_text(call, "id", where), name=_text(function, "name", where), arguments=_text(function, "arguments", where))


def _text(fields: Mapping[str, object], name: str, where: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}: {value!r} is no text", where)
    return value


def _list(value: object, where: str) -> Iterable[object]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise invalid(f"{where}: a list is needed", where)
    return value


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise invalid(f"{where}: an object with named fields is needed, not {value!r}", where)
    return value
