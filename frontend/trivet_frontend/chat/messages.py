"""A conversation as clients send it, made into what a template reads.

Content becomes a string, parts of text joined by a newline, in order; a template that iterates over parts gets parts of text. What a model
cannot read is refused with the message's place. Arguments of a tool call that are no JSON object do not poison the conversation: a template
that writes them gets the text unchanged, one that needs a mapping gets an empty one.
"""

import json
import logging
from typing import Any

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.chat.template_traits import ArgumentsForm, TemplateTraits

logger = logging.getLogger(__name__)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def normalised_messages(messages: Any, traits: TemplateTraits | None = None) -> list[dict[str, Any]]:
    """The messages for a template of `traits`, a plain one unless told; raises `TrivetError` naming the message at fault."""
    if not isinstance(messages, list):
        raise _refuse("messages", "must be a list")
    traits = traits or TemplateTraits()
    broken: list[str] = []
    plain = [_message(message, f"messages[{index}]", traits, broken) for index, message in enumerate(messages)]
    if broken:
        logger.warning("tool calls with arguments that are no JSON object: %d, the first at %s", len(broken), broken[0])
    return plain


def _message(message: Any, place: str, traits: TemplateTraits, broken: list[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refuse(place, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(f"{place}.role", f"must be one of {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if content is None and role not in ("assistant", "tool", "function"):
        raise _refuse(f"{place}.content", "is required")
    plain: dict[str, Any] = {"role": role, "content": _content(content, f"{place}.content", traits)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise _refuse(f"{place}.{name}", "must be a string")
            plain[name] = message[name]
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls", traits.arguments, broken)
    return plain


def _content(content: Any, place: str, traits: TemplateTraits) -> str | list[dict[str, str]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return content if traits.reads_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _refuse(place, "must be a string or a list of parts")
    texts = [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if traits.wants_parts else "\n".join(texts)


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


def _tool_calls(calls: Any, place: str, form: ArgumentsForm, broken: list[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refuse(place, "must be a list")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refuse(f"{place}[{index}]", "must be an object with a function that has a name")
        given = function.get("arguments")
        parsed = _parsed(given)
        if parsed is None:
            broken.append(f"{place}[{index}]")
        plain.append({**call, "function": {**function, "arguments": _arguments(given, parsed, form)}})
    return plain


def _parsed(arguments: Any) -> dict[str, Any] | None:
    """The object that `arguments` are or spell; nothing at all is an empty one, and None says that there is none."""
    if arguments is None or arguments == "":
        return {}
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _arguments(given: Any, parsed: dict[str, Any] | None, form: ArgumentsForm) -> Any:
    if form is ArgumentsForm.TEXT:
        if isinstance(given, str) and given:
            return given
        return json.dumps({} if parsed is None else parsed, ensure_ascii=False)
    if parsed is None:
        return given if form is ArgumentsForm.EITHER and isinstance(given, str) else {}
    return parsed


def _refuse(param: str, message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, f"{param} {message}", param=param)
