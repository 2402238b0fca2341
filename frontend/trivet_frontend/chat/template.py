"""Chat templates: Jinja in a sandbox, with what Hugging Face templates use.

A template's own complaint is the caller's error, in its words.
"""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from trivet_proto.errors import ErrorKind, TrivetError

MAX_TEMPLATE_CHARACTERS = 256 * 1024


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training; to a renderer it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """Raises INVALID_ARGUMENT when `source` is no template."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, "chat_template is too long", param="chat_template")
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"chat_template is no template: {error}", param="chat_template") from None


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Raises INVALID_ARGUMENT with the template's words when it refuses the conversation."""
    try:
        return compiled(source).render(variables)
    except TrivetError:
        raise
    except jinja2.TemplateError as error:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"the chat template refuses the messages: {error}", param="messages") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # A template is a program over the caller's values; what it trips over is in them.
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"the chat template cannot render the messages: {error}", param="messages") from None
