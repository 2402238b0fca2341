"""The keywords of `LLM` as the settings that `trivet serve` would have of the same flags. Pure; starts nothing.

What no keyword says comes, as there, from the variables and the configuration file, and in the end from the owning service.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

from trivet_chassis.setting_fields import Field, fields_of
from trivet_chassis.settings import PREFIX, nearest
from trivet_frontend.config import FrontendSettings
from trivet_frontend.serving import read_template
from trivet_proto.errors import TrivetError, invalid
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from trivet.launch.arguments import LAUNCHER, Argument
from trivet.launch.ownership import SCHEDULER, WORKER
from trivet.launch.planning import resolve_frontend, resolve_scheduler
from trivet.launch.settings import SERVICES, LoadedServeSettings, ServeSettings, load_serve_settings
from trivet.launch.workers import resolve_workers

IN_PROCESS = Path("/in-process")
"""Stands where a launch has its folder of sockets: nothing is ever there."""

NOWHERE = f"unix:{IN_PROCESS}/scheduler.sock"

PATIENCE_S = 86_400.0
"""How long a step in one process may take before it counts as lost: a debugger may hold it."""

SERVE = {field.name: field for field in fields_of(ServeSettings)}

OWN_SETTINGS = {
    field.name: service
    for service in (WORKER, SCHEDULER)
    for field in fields_of(SERVICES[service])
    if field.name not in SERVE and field.name not in {"name", "scheduler", "listen", "metrics_listen"}
}
"""What a worker or a scheduler takes and `trivet serve` does not, with whose it is; but where it is found."""

LOGS = Argument("log_format", "text", LAUNCHER, yields=True)


@dataclass(frozen=True, slots=True)
class InProcessPlan:
    """What the scheduler and the worker of one process are given; `address` is a name for where they would meet."""

    scheduler: SchedulerSettings
    worker: WorkerSettings
    address: str


def load_offline_settings(
    keywords: Mapping[str, object], environ: Mapping[str, str], own_settings: Mapping[str, object] | None = None
) -> LoadedServeSettings:
    """`keywords` are settings of `trivet serve`, and `config`; `own_settings` those of a worker or a scheduler alone.

    Those whose value is None are not said. Raises INVALID_ARGUMENT with the keyword's name.
    """
    of_services: dict[str, dict[str, object]] = {WORKER: {}, SCHEDULER: {}}
    for name, value in (own_settings or {}).items():
        if name not in OWN_SETTINGS:
            raise _unknown(name, [*keywords, *OWN_SETTINGS])
        if value is not None:
            of_services[OWN_SETTINGS[name]][name] = str(value)
    said = {name: value for name, value in keywords.items() if value is not None}
    file = [f"--config={said.pop('config')}"] if "config" in said else []
    values = {name: _as_in_a_file(SERVE[name], value) for name, value in said.items()}
    settings = replace(load_serve_settings(file, environ, prog="LLM", keywords=values), of_services=of_services)
    # Needed only when a model has been loaded, which is too late for a refusal.
    read_template(frontend_settings(settings, environ, NOWHERE).chat_template)
    return settings


def _as_in_a_file(field: Field, value: object) -> object:
    """What is a text here has its choices in the service that owns it, which judges whatever is written."""
    if field.name == "batch_invariant" and isinstance(value, bool):
        return "on" if value else "off"
    if field.kind is str:
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _unknown(name: str, known: list[str]) -> TrivetError:
    owner = next((service for service in (WORKER, SCHEDULER) if name in SERVE and name in SERVICES[service].__struct_fields__), None)
    if owner is not None:
        way = f"set the environment variable {PREFIX}{owner.upper()}_{name.upper()}, or {name} under [{owner}] in a file named by config"
        return invalid(f"{name} is no keyword of LLM but a setting of the {owner}: {way}", name)
    ways = f"{PREFIX}{WORKER.upper()}_<NAME> or {PREFIX}{SCHEDULER.upper()}_<NAME> in the environment, or a file named by config"
    return invalid(f"{name} is no keyword of LLM{nearest(name, known)}; what is none is set by {ways}", name)


def frontend_settings(settings: LoadedServeSettings, environ: Mapping[str, str], address: str) -> FrontendSettings:
    return resolve_frontend(settings, environ, (Argument("scheduler", address, LAUNCHER), LOGS)).value


def plan_in_process(settings: LoadedServeSettings, environ: Mapping[str, str]) -> InProcessPlan:
    if settings.value.workers != 1:
        raise invalid(f"workers: one process has one worker, not {settings.value.workers}; leave inprocess out for more", "workers")
    patience = tuple(Argument(name, PATIENCE_S, LAUNCHER, yields=True) for name in ("step_timeout", "first_step_timeout"))
    scheduler = resolve_scheduler(settings, environ, (Argument("listen", NOWHERE, LAUNCHER), *patience, LOGS))
    [worker] = resolve_workers(settings, environ, IN_PROCESS, NOWHERE, LOGS)
    return InProcessPlan(scheduler.value, worker.value, NOWHERE)


def in_keywords(error: TrivetError) -> TrivetError:
    """A refusal of a flag, as the person who wrote a keyword reads it."""
    param = error.param or ""
    flag = "--" + param.replace("_", "-")
    return TrivetError(error.kind, error.message.replace(flag, param) if param else error.message, param=error.param)
