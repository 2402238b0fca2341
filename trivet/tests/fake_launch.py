"""A launch of fake services, run as a script: `fake_launch.py OPTIONS`, a JSON object with folder, services (name → flags) and limits."""

import asyncio
import json
import os
import sys
from pathlib import Path

from trivet.launch.guard import Guard
from trivet.launch.plan import ProcessPlan
from trivet.launch.progress import create_progress
from trivet.launch.restarts import RestartPolicy
from trivet.launch.run_directory import create_run_directory
from trivet.launch.supervisor import LaunchFailed, Supervisor
from trivet_chassis.clock import SystemClock
from trivet_chassis.logging import configure_logging
from trivet_chassis.rpc import LIVE, READY

options = json.loads(sys.argv[1])
folder = Path(options["folder"])
configure_logging("launcher", "info", "text")


async def when_ready() -> None:
    (folder / "up").touch()
    print("UP", flush=True)


async def supervise(supervisor: Supervisor) -> int:
    supervisor.obey_signals()
    return await supervisor.run()


def launch() -> int:
    with create_run_directory({"TMPDIR": str(folder)}) as run_directory, Guard(run_directory) as guard:
        (folder / "guard").write_text(str(guard.pid))
        plans = [
            ProcessPlan(
                name=name,
                command=(
                    *(sys.executable, str(Path(__file__).with_name("fake_service.py")), name),
                    *(f"unix:{run_directory}/{name}.sock", str(folder / "journal"), *flags),
                ),
                environment=os.environ,
                health=f"unix:{run_directory}/{name}.sock",
                health_name=LIVE if name == "scheduler" else READY,
                stop_within_s=options["stop_within"],
            )
            for name, flags in options["services"].items()
        ]
        supervisor = Supervisor(
            plans,
            guard=guard,
            progress=create_progress(on_terminal=sys.stderr.isatty()),
            policy=RestartPolicy(SystemClock(), limit=options["max_restarts"]),
            startup_timeout_s=options["startup_timeout"],
            when_ready=when_ready,
        )
        try:
            return asyncio.run(supervise(supervisor))
        except LaunchFailed as failure:
            print(f"trivet: {failure.message}", file=sys.stderr, flush=True)
            return failure.exit_code


sys.exit(launch())
