"""Which tools a request offers and how it wants them used.

No parser of tool calls is served yet: with `auto` the model sees the tools if its template shows them, and what it writes is content.
What would need a
parser (`required`, a named function) is refused rather than ignored.
"""

from typing import Any

from trivet_proto.errors import ErrorKind, TrivetError


def check_tools(tools: Any, tool_choice: Any) -> list[dict[str, Any]] | None:
    """The tools to render with; raises `TrivetError` naming the field at fault."""
    names = [_name_of(tool, index) for index, tool in enumerate(_listed(tools))]
    if tool_choice is None or tool_choice in ("none", "auto"):
        return tools or None
    if tool_choice == "required":
        if not names:
            raise _refuse("tool_choice", "tool_choice is required, but there are no tools")
        raise _refuse("tool_choice", "tool_choice required is not served yet; use none or auto")
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function" and isinstance(tool_choice.get("function"), dict):
        name = tool_choice["function"].get("name")
        if not isinstance(name, str) or name not in names:
            raise _refuse("tool_choice", "tool_choice names a function that is not among the tools")
        raise _refuse("tool_choice", "tool_choice with a named function is not served yet; use none or auto")
    raise _refuse("tool_choice", "tool_choice must be none, auto, required, or an object that names a function")


def _listed(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _refuse("tools", "tools must be a list")
    return tools


def _name_of(tool: Any, index: int) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise _refuse("tools", f'tools[{index}] must be an object with type "function" and an object function')
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _refuse("tools", f"tools[{index}].function.name must be a string that is not empty")
    if not isinstance(function.get("parameters", {}) or {}, dict):
        raise _refuse("tools", f"tools[{index}].function.parameters must be an object")
    return name


def _refuse(param: str, message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=param)
