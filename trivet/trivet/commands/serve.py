"""`trivet serve [MODEL]`: settings → plan → checks → the supervisor. All the work is done in `trivet.launch`."""

import asyncio
import os
import sys
from collections.abc import Sequence

from trivet_chassis.announcing import announce_settings
from trivet_chassis.clock import SystemClock
from trivet_chassis.logging import configure_logging

from trivet.launch.greeting import greet
from trivet.launch.guard import Guard
from trivet.launch.planning import plan_launch
from trivet.launch.preflight import refuse_busy_address
from trivet.launch.progress import create_progress
from trivet.launch.restarts import RestartPolicy
from trivet.launch.run_directory import create_run_directory
from trivet.launch.settings import load_serve_settings
from trivet.launch.supervisor import LaunchFailed, Supervisor


def run(argv: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    settings = load_serve_settings(argv, os.environ, prog="trivet serve")
    on_terminal = sys.stderr.isatty()
    log_format = configure_logging("launcher", settings.value.log_level, settings.value.log_format)
    announce_settings(settings.loaded, log_format)

    with create_run_directory(os.environ) as run_directory:
        plan = plan_launch(settings, os.environ, run_directory, log_format=log_format)
        refuse_busy_address(plan.gateway)
        with Guard(run_directory) as guard:
            supervisor = Supervisor(
                plan.processes,
                guard=guard,
                progress=create_progress(on_terminal=on_terminal),
                policy=RestartPolicy(SystemClock(), limit=settings.value.max_restarts),
                startup_timeout_s=settings.value.startup_timeout,
                when_ready=lambda: greet(plan),
            )
            try:
                return asyncio.run(_supervise(supervisor))
            except LaunchFailed as failure:
                print(f"trivet: {failure.message}", file=sys.stderr, flush=True)
                return failure.exit_code


async def _supervise(supervisor: Supervisor) -> int:
    supervisor.obey_signals()
    return await supervisor.run()
