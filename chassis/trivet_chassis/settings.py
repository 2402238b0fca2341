"""One way to configure every service: defaults < TOML file < environment < command line < what a program says itself.

A service describes its settings once, as a frozen msgspec struct whose fields carry `Setting` metadata; flags, environment
variables, file keys and help come from that. Unknown keys are errors that name the nearest known one. Nothing here is
remembered: `load_settings` is a function of its arguments. What a value may look like is in `setting_values.py`.
"""

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec
from trivet_proto.errors import TrivetError, invalid

from trivet_chassis.setting_fields import ByteSize, Field, Setting, fields_of
from trivet_chassis.setting_values import convert, parse_size

__all__ = [
    "CONFIG_VARIABLE",
    "PREFIX",
    "SECTIONS",
    "ByteSize",
    "Loaded",
    "Setting",
    "check_native_variables",
    "explain",
    "load_settings",
    "nearest",
    "parse_size",
]

T = TypeVar("T", bound=msgspec.Struct)

SECTIONS = ("frontend", "scheduler", "worker", "serve", "mock_worker", "mock_scheduler")
PREFIX = "TRIVET_"
CONFIG_VARIABLE = "TRIVET_CONFIG"
NATIVE_VARIABLES: Mapping[str, tuple[str, ...]] = {"TRIVET_CPU_ISA": ("plain", "avx2", "avx512", "amx")}
"""No service's settings: native code reads them. With their values."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """The final settings, and where each value came from.

    An origin is "default", "file PATH", "env NAME", "flag --name", "argument NAME" or "keyword name".
    """

    value: T
    origins: dict[str, str]
    secrets: frozenset[str]

    def describe(self) -> str:
        """One line per setting with its origin; secrets are hidden."""
        return "\n".join(f"{name} = {self.shown(name)}  [{origin}]" for name, origin in self.origins.items())

    def shown(self, name: str) -> str:
        """One setting's value for people."""
        value = getattr(self.value, name)
        return "(hidden)" if name in self.secrets and value else repr(value)


@dataclass(frozen=True, slots=True)
class _Given:
    """One setting as somebody wrote it: `label` is for messages, `origin` for the description."""

    field: Field
    raw: object
    label: str
    origin: str


def load_settings(
    cls: type[T],
    *,
    section: str,
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    keywords: Mapping[str, object] | None = None,
) -> Loaded[T]:
    """Read `cls` from all sources. `--help` prints and exits; whatever a person got wrong is a `TrivetError` with the way out.

    `keywords` are settings by their names that a program says itself, as values; nothing goes over them.
    """
    assert section in SECTIONS, section
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in fields_of(cls)}
    flags = _parse_flags(fields.values(), prog, description, section, sys.argv[1:] if argv is None else argv)

    values: dict[str, object] = {name: field.default for name, field in fields.items() if field.default is not msgspec.NODEFAULT}
    origins = dict.fromkeys(values, "default")
    path = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    sources = (
        _read_file(path, fields, section),
        _read_environment(fields, section, environ),
        _read_flags(fields, flags),
        (_Given(fields[name], value, name, f"keyword {name}") for name, value in (keywords or {}).items()),
    )
    for given in [given for source in sources for given in source]:
        values[given.field.name] = convert(given.field, given.raw, given.label)
        origins[given.field.name] = given.origin
    missing = [field for name, field in fields.items() if name not in values]
    if missing:
        raise invalid(f"{missing[0].spelling} is needed: {missing[0].setting.help}", missing[0].name)
    secrets = frozenset(name for name, field in fields.items() if field.setting.secret)
    return Loaded(cls(**values), {name: origins[name] for name in fields}, secrets)


def nearest(word: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def explain(error: TrivetError) -> str:
    """The one line that a person sees of a configuration error."""
    return f"configuration: {error.message}"


# ---- the command line ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise invalid(f"{message}; {self.prog} --help lists the flags")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps a description's lines and gives long flags room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _parse_flags(fields: Iterable[Field], prog: str, description: str, section: str, argv: Sequence[str]) -> dict[str, str]:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_HelpFormatter)
    parser.epilog = (
        f"Each flag can also be given as {PREFIX}{section.upper()}_<NAME> in the environment, or as a key of the table\n"
        f"[{section}] in a TOML file named by --config or {CONFIG_VARIABLE}. Flags win over the environment, which wins over the file."
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    known = ["--config", "--help"]
    positional = []
    for field in fields:
        text = _help_of(field)
        if field.setting.positional:
            parser.add_argument(field.name, nargs="?", metavar=field.spelling, default=argparse.SUPPRESS, help=text)
            positional.append(field)
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
        for field in positional:
            if word == field.flag:
                raise invalid(f"{word}: {field.spelling} is given without a flag, as in {prog} {field.spelling}", field.name)
        raise invalid(f"{word} is not known to {prog}{nearest(word, known)}; {prog} --help lists the flags", word)
    return dict(vars(namespace))


def _help_of(field: Field) -> str:
    notes = []
    if field.unit:
        notes.append(field.unit)
    if field.default is not msgspec.NODEFAULT and field.default not in (None, ()) and not field.setting.secret:
        notes.append(f"default {_shown(field.default)}")
    text = field.setting.help + (f" ({', '.join(notes)})" if notes else "")
    return text.replace("%", "%%")


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return str(getattr(default, "value", default)) or "none"


def _read_flags(fields: Mapping[str, Field], flags: Mapping[str, str]) -> Iterator[_Given]:
    for name, raw in flags.items():
        field = fields[name]
        yield _Given(field, raw, field.spelling, f"{'argument' if field.setting.positional else 'flag'} {field.spelling}")


# ---- the file and the environment ----


def _read_file(path: str | None, fields: Mapping[str, Field], section: str) -> Iterator[_Given]:
    if path is None:
        return
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
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
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise invalid(f"{path}: {key} is not a setting of [{section}]{nearest(name, list(fields))}", key)
        yield _Given(fields[name], value, f"{key} in {path}", f"file {path}")


def check_native_variables(environ: Mapping[str, str]) -> None:
    """Raises INVALID_ARGUMENT for a value that native code does not know and would pass over."""
    for variable, choices in NATIVE_VARIABLES.items():
        value = environ.get(variable)
        if value is not None and value not in choices:
            raise invalid(f"the environment variable {variable} is {value!r}; it is one of {', '.join(choices)}", variable)


def _read_environment(fields: Mapping[str, Field], section: str, environ: Mapping[str, str]) -> Iterator[_Given]:
    prefixes = {name: f"{PREFIX}{name.upper()}_" for name in SECTIONS}
    own = prefixes[section]
    check_native_variables(environ)
    names = {own + name.upper(): field for name, field in fields.items()}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or variable in NATIVE_VARIABLES:
            continue
        if variable in names:
            yield _Given(names[variable], value, variable, f"env {variable}")
        elif variable.startswith(own) or not variable.startswith(tuple(prefixes.values())):
            raise invalid(f"the environment variable {variable} is not known{nearest(variable, list(names))}", variable)
