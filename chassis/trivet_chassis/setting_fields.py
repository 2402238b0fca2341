"""What a setting is: the metadata that a field of a settings struct carries, and the field as the loader sees it.

Everything else (flags, variables, file keys, help, messages) is derived from this. Nothing is read or converted here.
"""

import enum
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a person needs to know of a field. `unit="bytes"` takes sizes such as `2GiB`; `choices` narrows a text to a list.

    `maximum_reason` says why there can be no more, where that is not plain.
    """

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    maximum_reason: str = ""
    secret: bool = False
    positional: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of an annotated type, for fields that don't name one in their `Setting`."""

    name: str


ByteSize = Annotated[int, Unit("bytes")]
"""A number of bytes, written as `1024`, `512MiB` or `2GiB`."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a settings struct; `kind` is its type without Annotated and None."""

    name: str
    kind: Any
    optional: bool
    setting: Setting
    unit: str
    default: object

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def spelling(self) -> str:
        """How it is written on a command line."""
        return self.name.upper() if self.setting.positional else self.flag

    @property
    def choices(self) -> dict[str, object]:
        """What may be written, and the value that each stands for; empty when the type is open."""
        if get_origin(self.kind) is Literal:
            return {str(value): value for value in get_args(self.kind)}
        if isinstance(self.kind, type) and issubclass(self.kind, enum.Enum):
            return {str(member.value): member for member in self.kind}
        return {word: word for word in self.setting.choices}

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple


def fields_of(cls: type[msgspec.Struct]) -> list[Field]:
    """The fields of `cls` in their order."""
    hints = get_type_hints(cls, include_extras=True)
    fields = []
    for info in msgspec.structs.fields(cls):
        kind, optional, metadata = _unwrap(hints[info.name])
        setting = next((item for item in metadata if isinstance(item, Setting)), Setting(help=""))
        unit = setting.unit or next((item.name for item in metadata if isinstance(item, Unit)), "")
        default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default
        fields.append(Field(info.name, kind, optional, setting, unit, default))
    return fields


def _unwrap(kind: Any) -> tuple[Any, bool, list[object]]:
    """The bare type, whether None is allowed, and all metadata, from the outside in."""
    optional = False
    metadata: list[object] = []
    while True:
        if get_origin(kind) is Annotated:
            kind, *found = get_args(kind)
            metadata += found
        elif get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind):
            optional = True
            (kind,) = (part for part in get_args(kind) if part is not type(None))
        else:
            return kind, optional, metadata
