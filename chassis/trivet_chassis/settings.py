"""One way to configure every service: defaults < TOML file < environment < command line.

A service describes its settings once, as a frozen msgspec struct whose fields carry `Setting` metadata; flags, environment
variables, file keys and help come from that. Unknown keys are errors that name the nearest known one. Nothing here is
remembered: `load_settings` is a function of its arguments.
"""

import argparse
import difflib
import os
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from trivet_proto.errors import TrivetError, invalid

T = TypeVar("T", bound=msgspec.Struct)

SECTIONS = ("frontend", "scheduler", "worker", "serve")
PREFIX = "TRIVET_"
CONFIG_VARIABLE = "TRIVET_CONFIG"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a person needs to know of a field. `unit="bytes"` takes sizes such as `2GiB`."""

    help: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    positional: bool = False


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """The final settings, and where each value came from: "default", "file PATH", "env NAME" or "flag --name"."""

    value: T
    origins: dict[str, str]
    secrets: frozenset[str]

    def describe(self) -> str:
        """One line per setting with its origin; secrets are hidden."""
        rows = []
        for name, origin in self.origins.items():
            value = getattr(self.value, name)
            shown = "(hidden)" if name in self.secrets and value else repr(value)
            rows.append(f"{name} = {shown}  [{origin}]")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: Any  # the type without Annotated and None
    optional: bool
    setting: Setting
    default: object

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(choice) for choice in get_args(self.kind)) if get_origin(self.kind) is Literal else ()


def load_settings(
    cls: type[T],
    *,
    section: str,
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """Read `cls` from all sources. `--help` prints and exits; whatever a person got wrong is a `TrivetError` with the way out."""
    assert section in SECTIONS, section
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in _fields(cls)}
    given = _parse_flags(fields.values(), prog, description, section, sys.argv[1:] if argv is None else argv)

    values: dict[str, object] = {name: field.default for name, field in fields.items() if field.default is not msgspec.NODEFAULT}
    origins = dict.fromkeys(values, "default")
    path = given.pop("config", None) or environ.get(CONFIG_VARIABLE)
    sources = [*_read_file(path, fields, section), *_read_environment(fields, section, environ)]
    sources += [(name, fields[name], raw, f"flag {fields[name].flag}") for name, raw in given.items()]
    for name, field, raw, origin in sources:
        values[name] = _convert(field, raw, origin)
        origins[name] = origin
    missing = [field for name, field in fields.items() if name not in values]
    if missing:
        raise invalid(f"{missing[0].flag} is needed: {missing[0].setting.help}", missing[0].name)
    secrets = frozenset(name for name, field in fields.items() if field.setting.secret)
    return Loaded(cls(**values), {name: origins[name] for name in fields}, secrets)


def nearest(word: str, known: Sequence[str]) -> str:
    """ ", did you mean X?" or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def parse_size(text: str) -> int:
    """Bytes out of `1024`, `64MiB`, `1.5 GB`. Raises ValueError."""
    number = text.strip()
    unit = ""
    while number and not (number[-1].isdigit() or number[-1] == "."):
        unit, number = number[-1] + unit, number[:-1]
    scale = UNITS.get(unit.strip().upper())
    if scale is None:
        raise ValueError(f"{unit.strip()!r} is no unit of size: use B, KiB, MiB, GiB")
    return int(float(number) * scale)


# ---- the description ----


def _fields(cls: type[msgspec.Struct]) -> list[_Field]:
    hints = get_type_hints(cls, include_extras=True)
    fields = []
    for info in msgspec.structs.fields(cls):
        setting, kind = Setting(help=""), hints[info.name]
        if get_origin(kind) is Annotated:
            kind, *metadata = get_args(kind)
            setting = next((item for item in metadata if isinstance(item, Setting)), setting)
        optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
        if optional:
            kind = next(part for part in get_args(kind) if part is not type(None))
        default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default
        fields.append(_Field(info.name, kind, optional, setting, default))
    return fields


# ---- sources ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise invalid(f"{message}; {self.prog} --help lists the flags")


def _parse_flags(fields: Any, prog: str, description: str, section: str, argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = (
        f"Each flag can also be given as {PREFIX}{section.upper()}_<NAME> in the environment, or as a key of the table "
        f"[{section}] in a TOML file named by --config or {CONFIG_VARIABLE}."
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    known = ["--config", "--help"]
    for field in fields:
        text = _help_of(field)
        if field.setting.positional:
            parser.add_argument(field.name, nargs="?", metavar=field.name.upper(), default=argparse.SUPPRESS, help=text)
        elif field.kind is bool:
            parser.add_argument(field.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            known += [field.flag, "--no-" + field.flag.removeprefix("--")]
        else:
            metavar = "{" + ",".join(field.choices) + "}" if field.choices else field.name.rsplit("_", 1)[-1].upper()
            parser.add_argument(field.flag, metavar=metavar, default=argparse.SUPPRESS, help=text)
            known.append(field.flag)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].split("=", 1)[0]
        raise invalid(f"{word} is not known to {prog}{nearest(word, known)}; {prog} --help lists the flags", word)
    return vars(namespace)


def _help_of(field: _Field) -> str:
    notes = []
    if field.setting.unit:
        notes.append(field.setting.unit)
    if field.default is not msgspec.NODEFAULT and field.default is not None and field.default != () and not field.setting.secret:
        shown = str(field.default).lower() if field.kind is bool else field.default
        notes.append(f"default {shown if shown != '' else 'none'}")
    text = field.setting.help + (f" ({', '.join(notes)})" if notes else "")
    return text.replace("%", "%%")


def _read_file(path: str | None, fields: Mapping[str, _Field], section: str) -> list[tuple[str, _Field, object, str]]:
    if path is None:
        return []
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise invalid(f"the configuration file {path} cannot be read: {error.strerror}", "config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the configuration file {path} is not TOML: {error}", "config") from error
    for name in tables:
        if name not in SECTIONS:
            raise invalid(f"{path}: [{name}] is not known{nearest(name, SECTIONS)}; tables are {', '.join(SECTIONS)}", name)
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise invalid(f"{path}: {section} must be a table, written as [{section}]", section)
    rows = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise invalid(f"{path}: {key} is not a setting of [{section}]{nearest(name, list(fields))}", key)
        rows.append((name, fields[name], value, f"file {path}"))
    return rows


def _read_environment(fields: Mapping[str, _Field], section: str, environ: Mapping[str, str]) -> list[tuple[str, _Field, object, str]]:
    prefixes = {name: f"{PREFIX}{name.upper()}_" for name in SECTIONS}
    own = prefixes[section]
    names = {own + name.upper(): name for name in fields}
    rows: list[tuple[str, _Field, object, str]] = []
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable in names:
            name = names[variable]
            rows.append((name, fields[name], value, f"env {variable}"))
        elif variable.startswith(own) or not variable.startswith(tuple(prefixes.values())):
            raise invalid(f"the environment variable {variable} is not known{nearest(variable, list(names))}", variable)
    return rows


# ---- values ----


def _convert(field: _Field, raw: object, origin: str) -> object:
    label = origin.split(" ", 1)[1] if origin.startswith(("flag", "env")) else f"{field.name} in {origin.split(' ', 1)[1]}"
    if field.optional and isinstance(raw, str) and raw == "" and field.kind is not str:
        return None
    try:
        value = _parse(field, raw)
    except (ValueError, TypeError) as error:
        raise invalid(f"{label}: {raw!r} is not {_wanted(field)}" + (f" ({error})" if field.setting.unit else ""), field.name) from error
    if isinstance(value, int | float) and not isinstance(value, bool):
        if field.setting.minimum is not None and not value >= field.setting.minimum:
            raise invalid(f"{label}: {raw} is below {field.setting.minimum:g}", field.name)
        if field.setting.maximum is not None and not value <= field.setting.maximum:
            raise invalid(f"{label}: {raw} is above {field.setting.maximum:g}", field.name)
    return value


def _parse(field: _Field, raw: object) -> object:
    kind = field.kind
    if field.choices:
        return _choose(field.choices, get_args(kind), raw)
    if get_origin(kind) is tuple:
        items = [item.strip() for item in raw.split(",") if item.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError
        return tuple(items)
    if isinstance(raw, str) and kind is not str:
        return _PARSERS[kind](raw) if field.setting.unit != "bytes" else parse_size(raw)
    if isinstance(raw, bool) is not (kind is bool):
        raise ValueError
    if kind is float and isinstance(raw, int):
        return float(raw)
    if not isinstance(raw, kind):
        raise ValueError
    return raw


def _choose(names: tuple[str, ...], values: tuple[object, ...], raw: object) -> object:
    return values[names.index(str(raw))]


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError
    return word in TRUE


_PARSERS: dict[Any, Callable[[str], object]] = {bool: _parse_bool, int: int, float: float}


def _wanted(field: _Field) -> str:
    if field.choices:
        return "one of " + ", ".join(field.choices)
    if get_origin(field.kind) is tuple:
        return "a list of texts, separated by commas"
    if field.setting.unit == "bytes":
        return "a size such as 512MiB or 2GiB"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[field.kind]


def explain(error: TrivetError) -> str:
    """The one line that a person sees of a configuration error."""
    return f"configuration: {error.message}"
