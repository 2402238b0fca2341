"""The fenced commands of docs/doubles.md, run as they stand there but for addresses and, in the measurements, their length."""

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trivet_chassis.rpc import is_serving

ROOT = Path(__file__).parents[2]
BIN = f"{Path(sys.executable).parent}/"
BLOCKS: list[tuple[str, str]] = re.findall(
    r"^```(sh|python)\n(.*?)^```$", (ROOT / "docs" / "doubles.md").read_text(), re.DOTALL | re.MULTILINE
)
FRONTEND_STORY, SCHEDULER_STORY = BLOCKS[:3], BLOCKS[3:6]
(IN_TESTS,) = [text for language, text in BLOCKS[6:] if language == "python"]
MEASUREMENTS = [text for language, text in BLOCKS[6:] if language == "sh"]
SOON_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def service(command: str, *, health: str, ready: str = "ready") -> AsyncIterator[None]:
    """One that the page starts, until it is ended."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"exec {command.strip()}", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        async with asyncio.timeout(SOON_S):
            while not await is_serving(health, service=ready):
                assert process.returncode is None, (await process.communicate())[1]
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()
    assert process.returncode == 0, command


async def printed(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    async with asyncio.timeout(SOON_S):
        out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode()


def test_the_page_holds_what_is_run_here() -> None:
    assert [language for language, _ in FRONTEND_STORY + SCHEDULER_STORY] == ["sh", "sh", "sh", "sh", "sh", "python"]
    assert len(MEASUREMENTS) == 2
    assert len(BLOCKS) == 9


async def test_a_frontend_is_served_by_a_mock_scheduler(socket_folder: Path) -> None:
    scheduler, public, port = f"127.0.0.1:{free_port()}", f"unix:{socket_folder}/f.sock", free_port()
    (_, mock), (_, frontend), (_, curl) = FRONTEND_STORY
    mock = mock.strip().replace(".venv/bin/", BIN) + f' --listen {scheduler} --metrics-listen ""'
    frontend = frontend.strip().replace(".venv/bin/", BIN).replace("127.0.0.1:7100", scheduler)
    async with service(mock, health=scheduler), service(f"{frontend} --port {port} --grpc-listen {public}", health=public):
        text = await printed("bash", "-euo", "pipefail", "-c", curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    assert re.search(r'"text":\s*"( [a-z]+){8}"', text), text


async def test_a_scheduler_is_served_by_a_mock_worker(socket_folder: Path) -> None:
    address, health = f"127.0.0.1:{free_port()}", f"unix:{socket_folder}/w.sock"
    (_, scheduler), (_, mock), (_, script) = SCHEDULER_STORY
    scheduler = scheduler.strip().replace(".venv/bin/", BIN) + f' --listen {address} --metrics-listen ""'
    mock = mock.strip().replace(".venv/bin/", BIN) + f' --scheduler {address} --listen {health} --metrics-listen ""'
    async with service(scheduler, health=address, ready="live"), service(mock, health=health):
        assert (await printed(sys.executable, "-c", script.replace("127.0.0.1:7100", address))).startswith("right [")


async def test_the_example_of_a_test_shows_its_fault() -> None:
    assert await printed(sys.executable, "-c", IN_TESTS) == "the request fails on cue after 3 tokens\n"


@pytest.mark.parametrize("command", MEASUREMENTS)
async def test_a_measurement_prints_its_table(command: str) -> None:
    short = re.sub(r"(--\w+) [\d,]+", r"\1 2", command.strip()).replace(".venv/bin/", BIN)
    table = await printed("bash", "-c", f"exec {short} --seconds 0.5")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) in (3, 4)
    assert any(float(line.split("|")[3]) > 0 for line in lines[2:]), table
