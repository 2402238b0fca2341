"""The keywords of `LLM` as the settings that `trivet serve` would have of the same flags. Pure; starts nothing.

What no keyword says comes, as there, from the variables and the configuration file, and in the end from the owning service.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trivet_frontend.config import FrontendSettings
from trivet_proto.errors import TrivetError, invalid
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from trivet.launch.arguments import LAUNCHER, Argument
from trivet.launch.planning import resolve_frontend, resolve_scheduler
from trivet.launch.settings import LoadedServeSettings, load_serve_settings
from trivet.launch.workers import resolve_workers

IN_PROCESS = Path("/in-process")
"""Stands where a launch has its folder of sockets: nothing is ever there."""

PATIENCE_S = 86_400.0
"""How long a step in one process may take before it counts as lost: a debugger may hold it."""

LOGS = Argument("log_format", "text", LAUNCHER, yields=True)


@dataclass(frozen=True, slots=True)
class InProcessPlan:
    """What the scheduler and the worker of one process are given; `address` is a name for where they would meet."""

    scheduler: SchedulerSettings
    worker: WorkerSettings
    address: str


def load_offline_settings(keywords: Mapping[str, object], environ: Mapping[str, str]) -> LoadedServeSettings:
    """`keywords` whose value is None are not said. Raises INVALID_ARGUMENT with the keyword's name."""
    words = [word for name, value in keywords.items() if value is not None for word in Argument(name, value, "keyword").words]
    return load_serve_settings(words, environ, prog="LLM")


def frontend_settings(settings: LoadedServeSettings, environ: Mapping[str, str], address: str) -> FrontendSettings:
    return resolve_frontend(settings, environ, (Argument("scheduler", address, LAUNCHER), LOGS)).value


def plan_in_process(settings: LoadedServeSettings, environ: Mapping[str, str]) -> InProcessPlan:
    if settings.value.workers != 1:
        raise invalid(f"workers: one process has one worker, not {settings.value.workers}; leave inprocess out for more", "workers")
    address = f"unix:{IN_PROCESS}/scheduler.sock"
    patience = tuple(Argument(name, PATIENCE_S, LAUNCHER, yields=True) for name in ("step_timeout", "first_step_timeout"))
    scheduler = resolve_scheduler(settings, environ, (Argument("listen", address, LAUNCHER), *patience, LOGS))
    [worker] = resolve_workers(settings, environ, IN_PROCESS, address, LOGS)
    return InProcessPlan(scheduler.value, worker.value, address)


def in_keywords(error: TrivetError) -> TrivetError:
    """A refusal of a flag, as the person who wrote a keyword reads it."""
    param = error.param or ""
    flag = "--" + param.replace("_", "-")
    return TrivetError(error.kind, error.message.replace(flag, param) if param else error.message, param=error.param)
