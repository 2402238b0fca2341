"""One service's command line and environment, out of the launch's settings and what the service's own sources say.

Pure: reads the configuration file and nothing else. The settings are resolved with the service's own class, so that a mistake is found
before the first process starts.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from trivet_chassis.settings import CONFIG_VARIABLE, PREFIX, SECTIONS, Loaded, load_settings

from trivet.launch.ownership import OWNERS
from trivet.launch.settings import LoadedServeSettings

T = TypeVar("T", bound=msgspec.Struct)

LAUNCHER = "the launcher"
"""The origin of what follows from being started here."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A value for a service's setting and who says so. One that `yields` is only given where nobody else said anything."""

    setting: str
    value: object
    origin: str
    yields: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        if self.setting == "model":
            path = str(self.value)  # as people write it: not a flag, whatever it begins with
            return (f"./{path}" if path.startswith("-") else path,)
        name = self.setting.replace("_", "-")
        if isinstance(self.value, bool):
            return (f"--{name}" if self.value else f"--no-{name}",)
        return (f"--{name}={','.join(self.value) if isinstance(self.value, tuple) else self.value}",)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A service's settings as it will read them, and how it is started to do so."""

    name: str
    loaded: Loaded[T]
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def value(self) -> T:
        return self.loaded.value


def resolve(
    service: str,
    cls: type[T],
    settings: LoadedServeSettings,
    environ: Mapping[str, str],
    launcher: tuple[Argument, ...],
    *,
    name: str = "",
) -> Resolved[T]:
    """`launcher` is what the launch itself decides; `name` is the process', where it isn't the service's. Raises for a wrong value."""
    given = list(_given(service, settings))
    secrets = {argument.setting: argument for argument in given if argument.setting in settings.loaded.secrets}
    environment = _environment_of(service, settings, environ, secrets)
    arguments = [argument for argument in given if argument.setting not in secrets]
    arguments += [argument for argument in launcher if not argument.yields]
    undecided = _load(service, cls, arguments, environment)
    arguments += [argument for argument in launcher if argument.yields and _is_open(undecided, argument.setting)]
    loaded = _load(service, cls, arguments, environment)

    origins = dict(loaded.origins)
    origins |= {argument.setting: argument.origin for argument in (*secrets.values(), *arguments)}
    command = (sys.executable, "-m", f"trivet_{service}", *_words(arguments))
    return Resolved(name or service, Loaded(loaded.value, origins, loaded.secrets), command, environment)


def _is_open(loaded: Loaded[T], setting: str) -> bool:
    """Whether nobody has decided on an address or format, or only that there is to be none."""
    return loaded.origins[setting] == "default" or not getattr(loaded.value, setting)


def _given(service: str, settings: LoadedServeSettings) -> Iterator[Argument]:
    for setting, owners in OWNERS.items():
        origin = settings.origins[setting]
        value = getattr(settings.value, setting)
        if service in owners and origin != "default" and value is not None:
            yield Argument(setting, value, origin)
    for setting, value in settings.of_services.get(service, {}).items():
        yield Argument(setting, value, f"keyword {setting}")


def _environment_of(
    service: str, settings: LoadedServeSettings, environ: Mapping[str, str], secrets: Mapping[str, Argument]
) -> dict[str, str]:
    """A service sees its own `TRIVET_*` variables alone. Secrets travel here, since everyone may read a command line."""
    others = tuple(f"{PREFIX}{section.upper()}_" for section in SECTIONS if section != service)
    environment = {name: value for name, value in environ.items() if not name.startswith(others)}
    if settings.config_file is not None:
        environment[CONFIG_VARIABLE] = settings.config_file
    for setting, argument in secrets.items():
        value = argument.value
        environment[f"{PREFIX}{service.upper()}_{setting.upper()}"] = ",".join(value) if isinstance(value, tuple) else str(value)
    return environment


def _load(service: str, cls: type[T], arguments: list[Argument], environment: Mapping[str, str]) -> Loaded[T]:
    return load_settings(cls, section=service, prog=f"trivet_{service}", description="", argv=_words(arguments), environ=environment)


def _words(arguments: list[Argument]) -> list[str]:
    return [word for argument in arguments for word in argument.words]
