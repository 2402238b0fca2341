"""From what a person wrote (a word of a command line, an environment variable, a TOML value) to the value of a setting.

Every refusal names the setting as it was written, the value, and what would have been right; the value of a secret is never shown.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, get_args

from trivet_proto.errors import invalid

from trivet_chassis.setting_fields import Field

UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power for power, letter in enumerate("KMGT", 1) for suffix, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})


def convert(field: Field, raw: object, label: str) -> object:
    """The value that `raw` stands for. Raises INVALID_ARGUMENT; `label` says where `raw` was written."""
    if field.optional and raw == "" and field.kind is not str:
        return None
    try:
        value = _parse(field, raw)
    except (ValueError, TypeError, OverflowError) as error:
        shown = "the value" if field.setting.secret else repr(raw)
        detail = f" ({error})" if field.unit == "bytes" and isinstance(raw, str) and not field.setting.secret else ""
        raise invalid(f"{label}: {shown} is not {_wanted(field)}{detail}", field.name) from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = "the value" if field.setting.secret else str(raw)
        if field.setting.minimum is not None and value < field.setting.minimum:
            raise invalid(f"{label}: {shown} is below {field.setting.minimum:g}", field.name)
        if field.setting.maximum is not None and value > field.setting.maximum:
            reason = f": {field.setting.maximum_reason}" if field.setting.maximum_reason else ""
            raise invalid(f"{label}: {shown} is above {field.setting.maximum:g}{reason}", field.name)
    return value


def parse_size(text: str) -> int:
    """Bytes out of `1024`, `64MiB`, `1.5 GB`. Raises ValueError that says what is wrong."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("write a number and a unit")
    number, unit = found.groups()
    scale = UNITS.get(unit.upper())
    if scale is None:
        raise ValueError(f"{unit!r} is no unit of size: use B, KiB, MiB, GiB, TiB")
    return int(Decimal(number) * scale) if "." in number else int(number) * scale


def _parse(field: Field, raw: object) -> object:
    if field.is_list:
        items: Any = [item.strip() for item in raw.split(",") if item.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise ValueError
        item_kind, choices = get_args(field.kind)[0], field.choices
        return tuple(choices[_written(item, choices)] if choices else _parse_one(item_kind, item) for item in items)
    choices = field.choices
    if choices:
        return choices[_written(raw, choices)]
    if field.unit == "bytes" and field.kind is int:
        size = parse_size(raw) if isinstance(raw, str) else _parse_one(int, raw)
        if not isinstance(size, int) or size < 0:
            raise ValueError("a size is not negative")
        return size
    return _parse_one(field.kind, raw)


def _written(raw: object, choices: dict[str, object]) -> str:
    word = str(raw)
    if isinstance(raw, bool) or word not in choices:
        raise ValueError
    return word


def _parse_one(kind: Any, raw: object) -> object:
    if isinstance(raw, str) and kind is not str:
        return _PARSERS[kind](raw)
    # TOML has types of its own: a number is no text, and true is no 1.
    if isinstance(raw, bool) is not (kind is bool):
        raise ValueError
    if kind is float and isinstance(raw, int | float):
        return _finite(float(raw))
    if not isinstance(raw, kind):
        raise ValueError
    return raw


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError
    return word in TRUE


def _parse_float(text: str) -> float:
    return _finite(float(text))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError
    return value


_PARSERS: dict[Any, Callable[[str], object]] = {bool: _parse_bool, int: int, float: _parse_float}
_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true and false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
}


def _wanted(field: Field) -> str:
    if field.is_list and field.choices:
        return f"a list of {', '.join(field.choices)}, separated by commas"
    if field.is_list:
        return f"a list of {_NAMES[get_args(field.kind)[0]][1]}, separated by commas"
    if field.choices:
        return "one of " + ", ".join(field.choices)
    if field.unit == "bytes":
        return "a size such as 512MiB or 2GiB"
    return _NAMES[field.kind][0]
