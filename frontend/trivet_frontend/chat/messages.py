"""A conversation as clients send it, made into what templates read: plain messages whose content is a string.

Parts of text are joined by a newline, in order. What a model cannot read is refused with the message's place.
"""

from typing import Any

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def normalised_messages(messages: Any) -> list[dict[str, Any]]:
    """Raises `TrivetError` naming the message at fault."""
    if not isinstance(messages, list):
        raise _refuse("messages", "must be a list")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refuse(place, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(f"{place}.role", f"must be one of {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if content is None and role not in ("assistant", "tool", "function"):
        raise _refuse(f"{place}.content", "is required")
    plain: dict[str, Any] = {"role": role, "content": _content(content, f"{place}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise _refuse(f"{place}.{name}", "must be a string")
            plain[name] = message[name]
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    return plain


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refuse(place, "must be a string or a list of parts")
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _refuse(place, "must be an object with a type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise _refuse(place, f"has the type {str(kind)[:64]!r}, which this model does not read; it reads text")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _refuse(f"{place}.{kind}", "must be a string")
    return text


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refuse(place, "must be a list")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refuse(f"{place}[{index}]", "must be an object with a function that has a name")
        plain.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return plain


def _arguments(arguments: Any) -> Any:
    """A mapping, which templates want. One broken turn of a model must not poison the conversation: what does not parse is empty."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) and arguments else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _refuse(param: str, message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, f"{param} {message}", param=param)
