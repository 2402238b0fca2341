"""The frontend as a process: help, configuration errors, drain on a signal."""

import asyncio
import signal
import sys

import httpx


async def run(*flags: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trivet_frontend", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_help_is_for_people() -> None:
    code, output = await run("--help")
    assert code == 0
    for word in ("--scheduler", "--api-key", "--uds", "--generation-config", "Start a scheduler"):
        assert word in output


async def test_a_wrong_flag_is_one_line_and_exit_code_2() -> None:
    code, output = await run("--shceduler", "x")
    assert code == 2
    assert "--scheduler" in output
    assert "Traceback" not in output
    code, output = await run("--host", "0.0.0.0")
    assert code == 2
    assert "insecure" in output


async def test_a_frontend_whose_name_another_has_taken_leaves_with_exit_code_2(scheduler, socket_folder) -> None:
    scheduler.name_taken = "another frontend has come under the name f: give each frontend its own --name"
    uds = str(socket_folder / "http.sock")
    frontend = asyncio.create_task(run("--name", "f", "--scheduler", scheduler.address, "--uds", uds, "--grpc-listen", ""))
    await scheduler.until(lambda: bool(scheduler.outboxes))
    scheduler.kill.set()
    code, output = await frontend
    assert code == 2
    assert f"configuration: {scheduler.name_taken}" in output
    assert "Traceback" not in output


async def test_sigterm_drains_and_leaves_cleanly(scheduler, socket_folder) -> None:
    path = socket_folder / "http.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trivet_frontend", "--scheduler", scheduler.address, "--uds", str(path), "--grpc-listen", ""
    )
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://trivet", timeout=20) as http:
        async with asyncio.timeout(20):
            while not (path.exists() and (await http.get("/health")).status_code == 200):
                await asyncio.sleep(0.05)
        scheduler.flowing.clear()
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}))
        await scheduler.until(lambda: bool(scheduler.live))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await http.get("/health")).status_code != 503:
                await asyncio.sleep(0.02)
        scheduler.flowing.set()
        assert (await running).status_code == 200
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert not path.exists()
