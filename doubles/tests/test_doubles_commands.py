"""The doubles as processes: help, mistakes, health, a drain, a death on cue."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from trivet.__main__ import main
from trivet_chassis.health import LIVE
from trivet_chassis.rpc import is_serving
from trivet_doubles.mock_frontend import MockFrontend
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import expected_output
from trivet_proto.errors import TrivetError


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIVET_CONFIG", raising=False)


@pytest.mark.parametrize(("command", "fault"), [("mock-worker", "--out-of-memory-above"), ("mock-scheduler", "--end-session-after")])
def test_help_shows_examples_and_faults(capsys: pytest.CaptureFixture[str], command: str, fault: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: trivet {command}" in shown
    assert f"  trivet {command} --synthetic" in shown
    assert fault in shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["mock-worker", "--fail-stpe", "3"], "configuration: --fail-stpe is not known to trivet mock-worker; did you mean --fail-step?"),
        (["mock-worker", "--silent"], "configuration: silent: it is said of a stall, so stall_step is needed too"),
        (["mock-worker", "--fail-step", "0"], "configuration: fail_step: steps are counted from 1"),
        (["mock-scheduler", "--silent"], "configuration: silent: it is said of a stall, so stall_after is needed too"),
        (["mock-scheduler", "--synthetic", "here.gguf"], "configuration: synthetic: the model here.gguf is named too"),
        (["mock-worker", "--metrics-listen", "0.0.0.0:1"], "configuration: metrics_listen"),
    ],
)
def test_a_mistake_is_one_readable_line(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


@asynccontextmanager
async def process(module: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def until_serving(address: str, service: str = "") -> None:
    async with asyncio.timeout(15):
        while not await is_serving(address, service=service):
            await asyncio.sleep(0.02)


async def test_a_mock_worker_process_serves_and_dies_on_cue_without_a_word(scheduler: str, socket_folder: Path, model: DoubleModel) -> None:
    health, page = f"unix:{socket_folder}/w.sock", f"unix:{socket_folder}/m.sock"
    flags = ("--synthetic", "--scheduler", scheduler, "--listen", health, "--metrics-listen", page, "--die-step", "30")
    async with process("trivet_doubles.mock_worker", *flags) as worker:
        await until_serving(health, LIVE)
        await until_serving(health)
        async with MockFrontend(scheduler) as frontend:
            (child,) = frontend.add([1, 2, 3], max_tokens=20)
            assert await child.until_ended() == expected_output([1, 2, 3], 0, 20, model.words)
            transport = httpx.AsyncHTTPTransport(uds=page.removeprefix("unix:"))
            async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
                metrics = (await http.get("/metrics")).text
                progress = await http.get("/health/progress")
            assert "trivet_mock_worker_wrong_slots 0.0" in metrics
            assert "trivet_streams 1.0" in metrics
            assert 'trivet_worker_steps_total{status="done"}' in metrics
            assert progress.status_code == 200
            assert progress.json()["busy"] is False
            frontend.add([1, 2, 3], max_tokens=20)
            assert await asyncio.wait_for(worker.wait(), 10) == -signal.SIGKILL


async def test_a_mock_worker_process_drains_on_sigterm(scheduler: str, socket_folder: Path) -> None:
    health = f"unix:{socket_folder}/w.sock"
    flags = ("--synthetic", "--scheduler", scheduler, "--listen", health, "--metrics-listen", "")
    async with process("trivet_doubles.mock_worker", *flags) as worker:
        await until_serving(health)
        worker.terminate()
        assert await asyncio.wait_for(worker.wait(), 10) == 0


async def test_a_mock_scheduler_process_serves_and_dies_on_cue_without_a_word(socket_folder: Path, model: DoubleModel) -> None:
    address = f"unix:{socket_folder}/own.sock"
    async with process(
        "trivet_doubles.mock_scheduler", "--synthetic", "--listen", address, "--metrics-listen", "", "--die-after", "7"
    ) as scheduler:
        await until_serving(address)
        async with MockFrontend(address) as frontend:
            (child,) = frontend.add([1, 2, 3], max_tokens=20)
            assert await asyncio.wait_for(scheduler.wait(), 10) == -signal.SIGKILL
            with pytest.raises(TrivetError):
                await child.until_ended()
            assert child.token_ids == expected_output([1, 2, 3], 0, 7, model.words)
