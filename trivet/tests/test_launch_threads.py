"""Nothing of a launch waits for asyncio's shared threads, of which there are few where there are few cores: all may be taken."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trivet.launch.child import Child
from trivet.launch.greeting import greet
from trivet.launch.guard import Guard
from trivet.launch.own_thread import in_own_thread
from trivet.launch.plan import Gateway, LaunchPlan, ProcessPlan

WITHIN_S = 20.0


@pytest.fixture
async def no_thread_left() -> AsyncIterator[None]:
    """The loop's pool has one thread, and that waits until the test is over."""
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(pool)
        taken = loop.run_in_executor(None, over.wait)
        yield
        over.set()
        await taken


def plan_of(name: str, code: str) -> ProcessPlan:
    command = (sys.executable, "-I", "-S", "-c", code)
    return ProcessPlan(name=name, command=command, environment=os.environ, health="", health_name="", stop_within_s=1.0)


@pytest.mark.usefixtures("no_thread_left")
async def test_the_end_of_each_of_many_children_is_noticed(tmp_path: Path) -> None:
    with Guard(tmp_path / "run") as guard:
        children = [
            Child(plan_of(f"worker-{code}", f"import sys; sys.stdin.read(); sys.exit({code})"), guard=guard, sink=lambda _: None)
            for code in range(5)
        ]
        codes = await asyncio.wait_for(asyncio.gather(*(child.exited for child in children)), WITHIN_S)
    assert codes == list(range(5))
    assert not any(child.is_alive for child in children)


@pytest.mark.usefixtures("no_thread_left")
async def test_the_greeting_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = Gateway(host="127.0.0.1", port=1, uds=str(tmp_path / "nobody"), grpc_listen="unix:/x")
    await asyncio.wait_for(greet(LaunchPlan((), gateway, ())), WITHIN_S)
    assert "Ctrl-C stops it." in capsys.readouterr().out


async def test_what_is_raised_in_a_thread_is_raised_to_who_waits() -> None:
    def fail() -> None:
        raise OSError("no such luck")

    with pytest.raises(OSError, match="no such luck"):
        await in_own_thread(fail, name="failing")


async def test_who_no_longer_waits_is_not_told() -> None:
    go = threading.Event()
    waiting = asyncio.create_task(in_own_thread(go.wait, name="late"))
    await asyncio.sleep(0)  # it has started
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (late,) = (thread for thread in threading.enumerate() if thread.name == "late")
    go.set()
    late.join(WITHIN_S)
    await asyncio.sleep(0)  # what the thread has told the loop is heard
