"""From the settings of `trivet serve` to a plan: which processes, who gets which flags and variables.

Pure: nothing is started, and no file but the configuration is read. The settings of all services are resolved here with their own classes,
so that a mistake in any of them is found before the first process starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet_chassis.logging import LogFormat
from trivet_chassis.rpc import LIVE, READY
from trivet_frontend.config import FrontendSettings
from trivet_scheduler.config import SchedulerSettings

from trivet.launch.arguments import LAUNCHER, Argument, Resolved, resolve
from trivet.launch.ownership import FRONTEND, SCHEDULER
from trivet.launch.plan import EnginePlan, Gateway, LaunchPlan, ProcessPlan
from trivet.launch.settings import LoadedServeSettings
from trivet.launch.workers import one_more_worker, resolve_workers

DRAIN_MARGIN_S = 5.0
"""How much longer than its own drain limit a service may take to leave before it is killed."""


def plan_launch(settings: LoadedServeSettings, environ: Mapping[str, str], run_directory: Path, *, log_format: LogFormat) -> LaunchPlan:
    """Raises `TrivetError` where the settings of a service are not right."""
    engine = plan_engine(settings, environ, run_directory, log_format=log_format)
    frontend = resolve_frontend(
        settings,
        environ,
        (
            Argument("scheduler", engine.scheduler_address, LAUNCHER),
            Argument("grpc_listen", f"unix:{run_directory}/frontend.sock", LAUNCHER, yields=True),
            Argument("log_format", log_format, LAUNCHER, yields=True),
            # Nobody brings another model: a start that waited for one would not end.
            Argument("exit_on_unreadable_model", value=True, origin=LAUNCHER),
        ),
    )
    own = frontend.value
    return LaunchPlan(
        (*engine.processes, _process(FRONTEND, frontend, own.grpc_listen, READY, own.drain_timeout)),
        Gateway(host=own.host, port=own.port, uds=own.uds, grpc_listen=own.grpc_listen, api_key=own.api_key[0] if own.api_key else ""),
        engine.one_more_worker,
    )


def plan_engine(settings: LoadedServeSettings, environ: Mapping[str, str], run_directory: Path, *, log_format: LogFormat) -> EnginePlan:
    """All but the frontend. Raises `TrivetError` where the settings of a service are not right."""
    address = f"unix:{run_directory}/scheduler.sock"
    logs = Argument("log_format", log_format, LAUNCHER, yields=True)
    scheduler = resolve_scheduler(
        settings,
        environ,
        (
            Argument("listen", address, LAUNCHER),
            Argument("metrics_listen", f"unix:{run_directory}/scheduler-metrics.sock", LAUNCHER, yields=True),
            logs,
        ),
    )
    workers = resolve_workers(settings, environ, run_directory, address, logs)
    return EnginePlan(
        (
            # It is ready only with a worker, which in turn needs it alive.
            _process(SCHEDULER, scheduler, address, LIVE, scheduler.value.drain_timeout),
            *(_process(worker.name, worker, worker.value.listen, READY, worker.value.drain_timeout) for worker in workers),
        ),
        address,
        one_more_worker(settings, workers[0]),
    )


def resolve_scheduler(
    settings: LoadedServeSettings, environ: Mapping[str, str], launcher: tuple[Argument, ...]
) -> Resolved[SchedulerSettings]:
    return resolve(SCHEDULER, SchedulerSettings, settings, environ, launcher)


def resolve_frontend(
    settings: LoadedServeSettings, environ: Mapping[str, str], launcher: tuple[Argument, ...]
) -> Resolved[FrontendSettings]:
    return resolve(FRONTEND, FrontendSettings, settings, environ, launcher)


def _process(name: str, resolved: Resolved[Any], health: str, health_name: str, drain_timeout_s: float) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        command=resolved.command,
        environment=resolved.environment,
        health=health,
        health_name=health_name,
        stop_within_s=drain_timeout_s + DRAIN_MARGIN_S,
        description=resolved.loaded.describe(),
    )
