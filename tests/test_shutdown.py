"""A deployment that is told to stop leaves nothing: no process, no socket. `deployed` looks after each interrupt; here it is counted."""

import signal
import subprocess
import sys

import httpx
import pytest

from tests.deployment import GONE_WITHIN, Deployment, deployed, eventually
from tests.gateway import calling


async def leave_no_trace(deployment: Deployment) -> None:
    async def gone() -> bool:
        return not deployment.processes() and not deployment.sockets()

    await eventually(gone, within=GONE_WITHIN, what="all processes and sockets are gone")
    async with httpx.AsyncClient(base_url=deployment.base_url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_an_interrupt_ends_three_services_and_their_launcher() -> None:
    async with deployed() as deployment:
        assert len(deployment.processes()) >= 4
        assert deployment.sockets()
        async with calling(deployment.base_url) as gateway:
            await gateway.still_answers()
        await deployment.interrupt()
        await leave_no_trace(deployment)


async def test_a_termination_of_the_launcher_alone_ends_its_services_too() -> None:
    async with deployed() as deployment:
        deployment.process.send_signal(signal.SIGTERM)
        await deployment.process.wait()
        await leave_no_trace(deployment)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1] + ".server":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever is inherited
sys.meta_path.insert(0, Interrupting)
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["trivet_frontend", "trivet_scheduler", "trivet_worker"])
def test_an_interrupt_during_the_imports_ends_a_service_without_a_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGINT
    assert "Traceback" not in done.stderr
