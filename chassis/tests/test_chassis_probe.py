"""The health question of containers, against a real metrics address."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from trivet_chassis.metrics import MetricsServer, create_registry
from trivet_chassis.probe import EXIT_HEALTHY, EXIT_UNHEALTHY, EXIT_USAGE, main


@asynccontextmanager
async def service(*, ready: bool) -> AsyncIterator[str]:
    server = MetricsServer("127.0.0.1:0", create_registry("test"), ready=lambda: ready)
    await server.start()
    try:
        yield f"http://{server.address}"
    finally:
        await server.stop()


async def asked(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trivet_chassis.probe", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_a_service_that_loads_is_live_and_not_ready() -> None:
    async with service(ready=False) as url:
        assert (await asked(f"{url}/health/live"))[0] == EXIT_HEALTHY
        code, printed = await asked(f"{url}/health/ready")
        assert code == EXIT_UNHEALTHY
        assert "503 not ready" in printed


async def test_a_service_that_serves_is_ready() -> None:
    async with service(ready=True) as url:
        assert await asked(f"{url}/health/ready") == (EXIT_HEALTHY, f"{url}/health/ready: 200 ready\n")


def test_nobody_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound and never listening
        taken.bind(("127.0.0.1", 0))
        assert main([f"http://127.0.0.1:{taken.getsockname()[1]}/health/live"]) == EXIT_UNHEALTHY
    assert "no answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["127.0.0.1:7101"], ["http://127.0.0.1:7101"], ["https://127.0.0.1/health/live"], ["http://a/b", "c"]]
)
def test_what_is_no_question_says_how_to_ask(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_USAGE
    assert "http://HOST:PORT/health/live" in capsys.readouterr().err
