"""From the settings of `trivet serve` to a plan: who gets which flags and variables.

Pure: nothing is started, and no file but the configuration is read. The settings of all three services are resolved here with their own
classes, so that a mistake in any of them is found before the first process starts.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from trivet_chassis.logging import LogFormat
from trivet_chassis.settings import CONFIG_VARIABLE, PREFIX, SECTIONS, Loaded, load_settings
from trivet_frontend.config import FrontendSettings
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from trivet.launch.ownership import FRONTEND, OWNERS, SCHEDULER, WORKER
from trivet.launch.plan import Gateway, LaunchPlan, ProcessPlan
from trivet.launch.settings import LoadedServeSettings

DRAIN_MARGIN_S = 5.0
"""How much longer than its own drain limit a service may take to leave before it is killed."""

STOP_WITHIN_S = 10.0
"""What a service without requests may take to leave: closing streams, giving memory back."""

LAUNCHER = "the launcher"


@dataclass(frozen=True, slots=True)
class _Argument:
    """A value for a service's setting and who says so. One that `yields` is only given where nobody else said anything."""

    setting: str
    value: object
    origin: str
    yields: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        if self.setting == "model":
            return (str(self.value),)  # as people write it: not a flag
        name = self.setting.replace("_", "-")
        if isinstance(self.value, bool):
            return (f"--{name}" if self.value else f"--no-{name}",)
        return (f"--{name}={','.join(self.value) if isinstance(self.value, tuple) else self.value}",)


@dataclass(frozen=True, slots=True)
class _Resolved:
    loaded: Loaded[msgspec.Struct]
    command: tuple[str, ...]
    environment: Mapping[str, str]


def plan_launch(settings: LoadedServeSettings, environ: Mapping[str, str], run_directory: Path, *, log_format: LogFormat) -> LaunchPlan:
    """Raises `TrivetError` where the settings of a service are not right."""
    scheduler_address = f"unix:{run_directory}/scheduler.sock"
    worker_address = f"unix:{run_directory}/worker.sock"
    terminal_logs = _Argument("log_format", log_format, LAUNCHER, yields=True)

    scheduler = _resolve(
        SCHEDULER,
        SchedulerSettings,
        settings,
        environ,
        (
            _Argument("listen", scheduler_address, LAUNCHER),
            _Argument("metrics_listen", f"unix:{run_directory}/scheduler-metrics.sock", LAUNCHER, yields=True),
            terminal_logs,
        ),
    )
    worker = _resolve(
        WORKER,
        WorkerSettings,
        settings,
        environ,
        (
            _Argument("scheduler", scheduler_address, LAUNCHER),
            _Argument("listen", worker_address, LAUNCHER),
            _Argument("metrics_listen", f"unix:{run_directory}/worker-metrics.sock", LAUNCHER, yields=True),
            terminal_logs,
        ),
    )
    frontend = _resolve(
        FRONTEND,
        FrontendSettings,
        settings,
        environ,
        (
            _Argument("scheduler", scheduler_address, LAUNCHER),
            _Argument("grpc_listen", f"unix:{run_directory}/frontend.sock", LAUNCHER, yields=True),
            terminal_logs,
        ),
    )
    own = frontend.loaded.value
    assert isinstance(own, FrontendSettings)
    return LaunchPlan(
        (
            _process(SCHEDULER, scheduler, scheduler_address, STOP_WITHIN_S),
            _process(WORKER, worker, worker_address, STOP_WITHIN_S),
            _process(FRONTEND, frontend, own.grpc_listen, own.drain_timeout + DRAIN_MARGIN_S),
        ),
        Gateway(host=own.host, port=own.port, uds=own.uds, grpc_listen=own.grpc_listen, api_key=own.api_key[0] if own.api_key else ""),
    )


def _process(name: str, resolved: _Resolved, health: str, stop_within_s: float) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        command=resolved.command,
        environment=resolved.environment,
        health=health,
        stop_within_s=stop_within_s,
        description=resolved.loaded.describe(),
    )


def _resolve(
    service: str,
    cls: type[msgspec.Struct],
    settings: LoadedServeSettings,
    environ: Mapping[str, str],
    launcher: tuple[_Argument, ...],
) -> _Resolved:
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
    return _Resolved(Loaded(loaded.value, origins, loaded.secrets), command, environment)


def _is_open(loaded: Loaded[msgspec.Struct], setting: str) -> bool:
    """Whether nobody has decided on an address or format, or only that there is to be none."""
    return loaded.origins[setting] == "default" or not getattr(loaded.value, setting)


def _given(service: str, settings: LoadedServeSettings) -> Iterator[_Argument]:
    for setting, owners in OWNERS.items():
        origin = settings.origins[setting]
        value = getattr(settings.value, setting)
        if service in owners and origin != "default" and value is not None:
            yield _Argument(setting, value, origin)


def _environment_of(
    service: str, settings: LoadedServeSettings, environ: Mapping[str, str], secrets: Mapping[str, _Argument]
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


def _load(service: str, cls: type[msgspec.Struct], arguments: list[_Argument], environment: Mapping[str, str]) -> Loaded[msgspec.Struct]:
    return load_settings(cls, section=service, prog=f"trivet_{service}", description="", argv=_words(arguments), environ=environment)


def _words(arguments: list[_Argument]) -> list[str]:
    return [word for argument in arguments for word in argument.words]
