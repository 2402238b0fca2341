"""A service without a purpose, run as a script: answers gRPC health on a socket, keeps a journal, and misbehaves as told."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from trivet_chassis.lifecycle import Lifecycle, run_service
from trivet_chassis.rpc import create_server

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("listen")
parser.add_argument("journal", type=Path)
parser.add_argument("--exit-at-start", type=int)
parser.add_argument("--exit-at-restart", type=int, help="once the journal knows of an earlier start")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--drain", type=float, default=0.0)
parser.add_argument("--stubborn", action="store_true", help="don't heed SIGTERM")
parser.add_argument("--grandchild", action="store_true")
options = parser.parse_args()


def note(event: str) -> None:
    with options.journal.open("a") as journal:
        journal.write(f"{options.name} {event} {os.getpid()}\n")


async def main(lifecycle: Lifecycle) -> None:
    if options.grandchild:
        note(f"grandchild-{subprocess.Popen(['sleep', '600']).pid}")
    server = await create_server(options.listen, register=lambda _: None, services=())
    await server.start()
    if not options.never_ready:
        await server.health.ready(True)
        note("ready")
    if options.stubborn:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, note, "deaf")
    await lifecycle.until_draining()
    note("draining")
    await asyncio.sleep(options.drain)
    await server.stop()
    note("left")


again = options.journal.exists() and f"{options.name} ready" in options.journal.read_text()
code = options.exit_at_restart if again and options.exit_at_restart is not None else options.exit_at_start
if code is not None:
    print(f"configuration: {options.name} wants its reasons" if code == 2 else f"{options.name}: out of luck", flush=True)
    sys.exit(code)
print(f"{options.name} speaks", flush=True)
sys.exit(run_service(main))
