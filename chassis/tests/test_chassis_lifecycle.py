"""A service's life, in processes of its own: signals, drains, exit codes, and deaths in the background."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

import pytest
from trivet_chassis.lifecycle import Lifecycle

PRELUDE = """
import asyncio, sys
from trivet_chassis import lifecycle as module
from trivet_chassis.lifecycle import Lifecycle, run_service
from trivet_chassis.logging import configure_logging
from trivet_proto.errors import ErrorKind, TrivetError, invalid
configure_logging("test")
module.FAILURE_GRACE_S = module.CANCEL_GRACE_S = 0.2

def say(text):
    print(text, flush=True)

async def die():
    raise ValueError("background trouble")
"""

SERVE = """
async def main(lifecycle):
    say("up")
    await lifecycle.until_draining()
    say("drained")
sys.exit(run_service(main, name="trivet-a-long-name"))
"""


@contextlib.asynccontextmanager
async def process(program: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PRELUDE + program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def result(program: str) -> tuple[int | None, str, str]:
    async with process(program) as child:
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


async def line(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await child.stdout.readline()).decode().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_exit_is_clean(number: signal.Signals) -> None:
    async with process(SERVE) as child:
        assert await line(child) == "up"
        child.send_signal(number)
        out, err = await child.communicate()
    assert (child.returncode, out) == (0, b"drained\n")
    assert f"{number.name}: draining" in err.decode()


async def test_the_process_has_its_name_while_it_runs() -> None:
    async with process(SERVE.replace('say("up")', 'say(open("/proc/self/comm").read())')) as child:
        assert await line(child) == "trivet-a-long-n"


async def test_the_second_signal_ends_at_once() -> None:
    program = """
async def main(lifecycle):
    say("up")
    await lifecycle.until_draining()
    say("draining")
    await asyncio.Event().wait()
sys.exit(run_service(main))
"""
    async with process(program) as child:
        assert await line(child) == "up"
        child.send_signal(signal.SIGTERM)
        assert await line(child) == "draining"
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("ending", ["await asyncio.Event().wait()", "await stubborn()"])
async def test_a_drain_that_outlasts_its_limit_is_ended(ending: str) -> None:
    program = f"""
async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            say("no")
async def main(lifecycle):
    say("up")
    await lifecycle.until_draining()
    {ending}
sys.exit(run_service(main, drain_limit_s=0.1))
"""
    async with process(program) as child:
        assert await line(child) == "up"
        child.send_signal(signal.SIGTERM)
        _, err = await child.communicate()
    assert child.returncode == 1
    assert "the drain took longer than 0.1 s" in err.decode()
    assert ("leaving by force" in err.decode()) == ("stubborn" in ending)


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        ("invalid('--port: 0 is below 1')", 2, "configuration: --port: 0 is below 1\n"),
        ("TrivetError(ErrorKind.MODEL_NOT_FOUND, 'no such model')", 2, "configuration: no such model\n"),
        ("TrivetError(ErrorKind.OUT_OF_MEMORY, 'too big')", 1, "the service ends: too big\n"),
    ],
)
async def test_an_error_of_ours_is_one_line_with_an_honest_code(raised: str, code: int, words: str) -> None:
    program = f"async def main(lifecycle):\n    raise {raised}\nsys.exit(run_service(main))"
    assert await result(program) == (code, "", words)


async def test_a_crash_is_exit_code_1_with_its_traceback_in_the_log() -> None:
    code, _, err = await result("async def main(lifecycle):\n    await die()\nsys.exit(run_service(main))")
    assert code == 1
    assert "ValueError: background trouble" in err


@pytest.mark.parametrize("wait", ["lifecycle.until_draining()", "asyncio.Event().wait()"])
@pytest.mark.parametrize("raised", ["ValueError('background trouble')", "invalid('background trouble')"])
async def test_a_background_task_that_dies_ends_the_service_whatever_it_waits_for(wait: str, raised: str) -> None:
    program = f"""
async def die():
    raise {raised}
async def main(lifecycle):
    lifecycle.supervise(die(), "heartbeat")
    try:
        await {wait}
    finally:
        say("cleaned up")
sys.exit(run_service(main))
"""
    code, out, err = await result(program)
    assert (code, out) == (1, "cleaned up\n")
    assert "the task 'heartbeat' died" in err
    assert err.count("Traceback") == 1


async def test_an_exception_that_nobody_awaits_is_logged_and_the_service_goes_on() -> None:
    program = """
async def main(lifecycle):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    say("still here")
sys.exit(run_service(main))
"""
    code, out, err = await result(program)
    assert (code, out) == (0, "still here\n")
    assert "ZeroDivisionError" in err
    assert '"level":"error"' in err


async def test_supervised_tasks_are_cancelled_when_the_service_ends() -> None:
    program = """
async def beside():
    try:
        await asyncio.Event().wait()
    finally:
        say("beside ended")
async def main(lifecycle):
    lifecycle.supervise(beside(), "beside")
    await asyncio.sleep(0)
sys.exit(run_service(main))
"""
    assert await result(program) == (0, "beside ended\n", "")


async def test_a_supervised_task_may_return() -> None:
    async def work() -> None:
        return

    lifecycle = Lifecycle()
    await lifecycle.supervise(work(), "work")
    lifecycle.draining.set()
    await lifecycle.until_draining()
    assert lifecycle.failure is None
