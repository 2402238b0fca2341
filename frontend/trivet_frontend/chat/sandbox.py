"""The environment that chat templates run in: Jinja's immutable sandbox, which also refuses to make huge values.

Jinja bounds `range` itself. Here the operators, string methods and filters are bounded that make much out of little in one call, which no
limit on the output could stop in time. How long a template loops is not bounded: whoever may bring a template is trusted with that.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The longest value that one operation may make out of a number.
MAX_MADE = 16 * 1024 * 1024
# Powers beyond this many bits.
MAX_BITS = 4096

_WIDTH = re.compile(r"\d{6,}")
_WIDTH_FILTERS = ("center", "indent", "wordwrap", "batch", "slice")


class GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training; to a renderer it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Owns the bounds on what a template may make."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        for name in _WIDTH_FILTERS:
            self.filters[name] = _bounded(FILTERS[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str) and (_WIDTH.search(left) or "*" in left):
            raise SecurityError("a format with such a width is refused")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here; methods of strings may not be told a huge width."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            _check_numbers(args, kwargs)
            if getattr(called, "__name__", "") in ("format", "format_map") and _WIDTH.search(owner):
                raise SecurityError("a format with such a width is refused")
        return super().call(context, called, *args, **kwargs)


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(count, int) and len(value) * count > MAX_MADE:
            raise SecurityError("a value that long is refused")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError("a number that large is refused")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise SecurityError("a number that large is refused")


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, int) and value > MAX_MADE for value in (*args, *kwargs.values())):
        raise SecurityError("a width that large is refused")


def _bounded(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return wrapped(*args, **kwargs)

    return checked
