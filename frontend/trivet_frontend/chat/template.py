"""Chat templates: Jinja in a sandbox, with what Hugging Face templates use.

A template is a program over the caller's values: what it complains of or trips over is the caller's error, in its words. What it writes is
bounded while it writes. Compiled templates are cached with what they expect of messages.
"""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.chat.sandbox import ChatEnvironment
from trivet_frontend.chat.template_traits import TemplateTraits, traits_of

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024
MAX_COMPLAINT_CHARACTERS = 1024


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ChatEnvironment:
    environment = ChatEnvironment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compiled(source: str, *, called: str = "chat_template") -> jinja2.Template:
    """Raises INVALID_ARGUMENT when `source` is no template, which the message then calls by this name."""
    template = _template_or_complaint(source)
    if isinstance(template, str):
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{called} {template}", param="chat_template")
    return template


@functools.lru_cache(maxsize=64)
def _template_or_complaint(source: str) -> jinja2.Template | str:
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        return f"has {len(source)} characters, which is too long; the limit is {MAX_TEMPLATE_CHARACTERS}"
    try:
        return _environment().from_string(source)
    except Exception as error:  # a template may be nested too deeply for the parser
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return f"is no template: {_words_of(error).removesuffix('.')}{line}"


@functools.lru_cache(maxsize=64)
def template_traits(source: str) -> TemplateTraits:
    """What the template expects of messages; raises as `compiled` does."""
    compiled(source)
    return traits_of(_environment().parse(source))


def render(source: str, variables: Mapping[str, Any], *, most_characters: int = MAX_RENDERED_CHARACTERS) -> str:
    """Raises INVALID_ARGUMENT with the template's words when it does not render the conversation within the limit."""
    template = compiled(source)
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > most_characters:
                break
            pieces.append(piece)
    except Exception as error:
        verb = "refuses" if isinstance(error, jinja2.TemplateError) else "cannot render"
        raise _refuse("messages", f"the chat template {verb} the messages", error) from None
    if length > most_characters:
        raise TrivetError(
            ErrorKind.INVALID_ARGUMENT,
            f"the chat template writes more than {most_characters} characters",
            param="messages",
        )
    return "".join(pieces)


def _refuse(param: str, what: str, error: Exception) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, f"{what}: {_words_of(error)}", param=param)


def _words_of(error: Exception) -> str:
    return str(error)[:MAX_COMPLAINT_CHARACTERS] or type(error).__name__
