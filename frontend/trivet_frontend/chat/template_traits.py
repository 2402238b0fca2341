"""What a chat template expects of its messages, read off its syntax tree: the form of content, and of a tool call's arguments.

A template that iterates over a message's content wants parts; every other one gets text. A name counts as content when it was set from a
message's `content` or passed on to a macro. Nothing is rendered here.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

# Filters whose result is no longer the value's own shape.
_TEXT_FILTERS = frozenset(
    {"trim", "string", "upper", "lower", "length", "count", "tojson", "replace", "join", "escape", "e", "first", "last"}
)
_MAPPING_FILTERS = frozenset({"items", "tojson", "dictsort"})
_MAPPING_METHODS = frozenset({"items", "keys", "values", "get"})


class ArgumentsForm(enum.Enum):
    """How a template reads the arguments of a tool call."""

    TEXT = "text"
    MAPPING = "mapping"
    # It asks which of the two it has, or never looks.
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template expects."""

    wants_parts: bool = False
    # A template of parts that asks `is string` reads plain text too, and then gets it as it came.
    reads_text: bool = True
    arguments: ArgumentsForm = ArgumentsForm.MAPPING


def traits_of(tree: nodes.Template) -> TemplateTraits:
    """The traits of a parsed template."""
    content, arguments = _Values(tree, "content"), _Values(tree, "arguments")
    wants_parts = any(content.holds(loop.iter) for loop in tree.find_all(nodes.For))
    return TemplateTraits(wants_parts, not wants_parts or content.tested_for_text(), _arguments_form(tree, arguments))


def _arguments_form(tree: nodes.Template, arguments: "_Values") -> ArgumentsForm:
    if arguments.tested_for_text():
        return ArgumentsForm.EITHER
    filtered = any(one.name in _MAPPING_FILTERS and one.node and arguments.holds(one.node) for one in tree.find_all(nodes.Filter))
    looped = any(arguments.holds(loop.iter) for loop in tree.find_all(nodes.For))
    asked = any(one.attr in _MAPPING_METHODS and arguments.holds(one.node) for one in tree.find_all(nodes.Getattr))
    subscribed = any(arguments.holds(one.node) for one in tree.find_all(nodes.Getitem))
    if filtered or looped or asked or subscribed:
        return ArgumentsForm.MAPPING
    written = any(arguments.holds(one) for one in _written(tree))
    return ArgumentsForm.TEXT if written else ArgumentsForm.EITHER


def _written(tree: nodes.Template) -> Iterator[nodes.Expr]:
    for output in tree.find_all(nodes.Output):
        yield from output.nodes
    for joined in tree.find_all(nodes.Concat):
        yield from joined.nodes
    for added in tree.find_all(nodes.Add):
        yield added.left
        yield added.right


class _Values:
    """The expressions of a template that hold one field of a message."""

    def __init__(self, tree: nodes.Template, field: str) -> None:
        self._tree = tree
        self._field = field
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        # A name may be set from one that is found later: repeat until nothing new is found.
        found = -1
        while found != len(self._names):
            found = len(self._names)
            self._follow(macros)

    def _follow(self, macros: dict[str, nodes.Macro]) -> None:
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self.holds(assign.node):
                self._names.add(assign.target.name)
        for call in self._tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is None:
                continue
            self._names.update(parameter.name for parameter, given in zip(macro.args, call.args, strict=False) if self.holds(given))
            self._names.update(given.key for given in call.kwargs if self.holds(given.value))

    def holds(self, node: nodes.Node) -> bool:
        """Whether `node` is the field, under whatever name."""
        match node:
            case nodes.Name():
                return node.name in self._names
            case nodes.Getattr():
                return node.attr == self._field
            case nodes.Getitem():
                return isinstance(node.arg, nodes.Const) and node.arg.value == self._field
            case nodes.Filter():
                return node.name not in _TEXT_FILTERS and node.node is not None and self.holds(node.node)
            case nodes.CondExpr():
                return self.holds(node.expr1) or (node.expr2 is not None and self.holds(node.expr2))
            case nodes.Or():
                return self.holds(node.left) or self.holds(node.right)
            case nodes.Call():
                return self._is_get(node)
        return False

    def _is_get(self, call: nodes.Call) -> bool:
        if not isinstance(call.node, nodes.Getattr) or call.node.attr != "get" or not call.args:
            return False
        return isinstance(call.args[0], nodes.Const) and call.args[0].value == self._field

    def tested_for_text(self) -> bool:
        return any(test.name in ("string", "mapping") and self.holds(test.node) for test in self._tree.find_all(nodes.Test))
