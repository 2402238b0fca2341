"""The supervisor as a real process over fake services: starting, dying, restarting, stopping, and never an orphan."""

import asyncio
import os
import pty
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psutil
import pytest

Launching = Callable[..., AbstractAsyncContextManager[Any]]


async def test_all_come_up_and_a_termination_stops_them_from_the_frontend_down(launching: Launching) -> None:
    async with launching(frontend=("--drain", "0.3")) as launch:
        await launch.up()
        assert len(launch.sockets()) == 3
        launch.process.send_signal(signal.SIGTERM)
        assert await launch.ended() == 0
        await launch.left_nothing()
        stopping = [entry for entry in launch.journal() if not entry.endswith("ready")]
        assert stopping == [f"{name} {event}" for name in ("frontend", "worker", "scheduler") for event in ("draining", "left")]


async def test_the_run_directory_is_private(launching: Launching) -> None:
    async with launching() as launch:
        await launch.up()
        (directory,) = launch.folder.glob("trivet-*")
        assert directory.stat().st_mode & 0o777 == 0o700
        launch.process.terminate()


async def test_logs_of_children_go_through_unchanged(launching: Launching) -> None:
    async with launching() as launch:
        await launch.up()
        for name in ("scheduler", "worker", "frontend"):
            assert f"{name} speaks" in launch.log().splitlines()
        launch.process.terminate()


async def test_a_ctrl_c_in_a_terminal_reaches_the_launcher_alone(launching: Launching) -> None:
    controller, terminal = pty.openpty()
    shown = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(controller, lambda: shown.extend(os.read(controller, 4096)))
    try:
        async with launching(terminal=terminal) as launch:
            await launch.up()
            os.write(controller, b"\x03")
            assert await launch.ended() == 0
            await launch.left_nothing()
            order = [entry for entry in launch.journal() if entry.endswith("draining")]
            assert order == ["frontend draining", "worker draining", "scheduler draining"]
    finally:
        loop.remove_reader(controller)
        os.close(controller)
        os.close(terminal)
    text = shown.decode(errors="replace")
    assert "UP" in text
    assert "scheduler  ready after" in text
    assert "worker speaks" in text


async def test_a_second_signal_ends_a_drain_at_once(launching: Launching) -> None:
    async with launching(frontend=("--drain", "600"), stop_within=600.0) as launch:
        await launch.up()
        launch.process.send_signal(signal.SIGINT)
        await launch.until(lambda: "frontend draining" in launch.journal(), "the frontend drains")
        launch.process.send_signal(signal.SIGINT)
        assert await launch.ended() == 128 + signal.SIGINT
        await launch.left_nothing()


async def test_a_child_that_does_not_heed_is_killed_when_its_time_is_up(launching: Launching) -> None:
    async with launching(frontend=("--stubborn",), stop_within=0.5) as launch:
        await launch.up()
        launch.process.terminate()
        assert await launch.ended() == 0
        assert "frontend deaf" in launch.journal()
        assert "hasn't left within 0.5 s" in launch.log()


async def test_a_signal_while_starting_stops_all(launching: Launching) -> None:
    async with launching(worker=("--never-ready",)) as launch:
        await launch.until(lambda: "scheduler ready" in launch.journal(), "the scheduler is ready")
        launch.process.terminate()
        assert await launch.ended() == 0


async def test_a_child_that_exits_while_starting_ends_the_launch_with_its_last_lines(launching: Launching) -> None:
    async with launching(worker=("--exit-at-start", "3")) as launch:
        assert await launch.ended() == 1
        assert "trivet: worker ended while starting (exit code 3); its last lines:\n    worker: out of luck" in launch.log()
        assert not (launch.folder / "up").exists()


async def test_a_configuration_error_is_passed_on(launching: Launching) -> None:
    async with launching(scheduler=("--exit-at-start", "2")) as launch:
        assert await launch.ended() == 2
        assert "trivet: scheduler refuses its configuration: scheduler wants its reasons" in launch.log()


async def test_a_child_that_does_not_become_ready_ends_the_launch(launching: Launching) -> None:
    async with launching(worker=("--never-ready",), startup_timeout=3.0) as launch:
        assert await launch.ended() == 1
        assert "worker isn't ready after 3 s" in launch.log()


@pytest.mark.parametrize("service", ["scheduler", "worker", "frontend"])
async def test_a_child_that_dies_is_restarted_and_the_others_go_on(launching: Launching, service: str) -> None:
    async with launching() as launch:
        await launch.up()
        before = {name: launch.pids(name) for name in ("scheduler", "worker", "frontend")}
        os.kill(before[service][0], signal.SIGKILL)
        await launch.until(lambda: len(launch.pids(service)) == 2, "it is back")
        launch.process.terminate()
        assert await launch.ended() == 0
        assert all(launch.pids(name) == before[name] for name in before if name != service)
        assert f"{service} died (killed by SIGKILL" in launch.log()


async def test_what_a_dead_child_had_started_is_gone_before_its_successor_is_there(launching: Launching) -> None:
    async with launching(worker=("--grandchild",)) as launch:
        await launch.up()
        (entry,) = [entry for entry in launch.journal() if "grandchild" in entry]
        os.kill(launch.pids("worker")[0], signal.SIGKILL)
        await launch.until(lambda: len(launch.pids("worker")) == 2, "it is back")
        assert not is_running(int(entry.rpartition("-")[2]))
        launch.process.terminate()


async def test_one_death_too_many_stops_all(launching: Launching) -> None:
    async with launching(max_restarts=1) as launch:
        await launch.up()
        os.kill(launch.pids("worker")[0], signal.SIGKILL)
        await launch.until(lambda: len(launch.pids("worker")) == 2, "it is back")
        os.kill(launch.pids("worker")[1], signal.SIGKILL)
        assert await launch.ended() == 1
        assert "once too often to go on" in launch.log()


@pytest.mark.parametrize("service", ["scheduler", "worker", "frontend"])
async def test_without_restarts_the_others_go_on_and_a_stop_leaves_nothing(launching: Launching, service: str) -> None:
    async with launching(max_restarts=0) as launch:
        await launch.up()
        os.kill(launch.pids(service)[0], signal.SIGKILL)
        await launch.until(lambda: f"{service} died" in launch.log(), "its death is noticed")
        launch.process.terminate()
        assert await launch.ended() == 0
        others = [name for name in ("frontend", "worker", "scheduler") if name != service]
        assert [entry for entry in launch.journal() if entry.endswith("left")] == [f"{name} left" for name in others]
        assert len(launch.pids(service)) == 1


async def test_without_restarts_the_launch_ends_with_its_last_child(launching: Launching) -> None:
    async with launching(max_restarts=0) as launch:
        await launch.up()
        for service in ("scheduler", "worker", "frontend"):
            os.kill(launch.pids(service)[0], signal.SIGKILL)
        assert await launch.ended() == 1
        assert "no service is left" in launch.log()


async def test_a_scheduler_that_lives_is_enough_though_it_is_not_ready(launching: Launching) -> None:
    async with launching(scheduler=("--never-ready",)) as launch:
        await launch.up()
        launch.process.terminate()
        assert await launch.ended() == 0


async def test_a_restarted_child_that_refuses_its_configuration_stops_all(launching: Launching) -> None:
    async with launching(worker=("--exit-at-restart", "2")) as launch:
        await launch.up()
        os.kill(launch.pids("worker")[0], signal.SIGKILL)
        assert await launch.ended() == 2


async def test_a_killed_launcher_leaves_no_orphan_and_no_socket(launching: Launching) -> None:
    async with launching(worker=("--grandchild",), frontend=("--stubborn",)) as launch:
        await launch.up()
        launch.process.kill()
        await launch.ended()
        await launch.left_nothing()


async def test_a_launcher_killed_while_its_children_start_leaves_nothing(launching: Launching) -> None:
    async with launching(worker=("--never-ready",)) as launch:
        await launch.until(lambda: "scheduler ready" in launch.journal(), "the scheduler is ready")
        launch.process.kill()


async def test_a_guard_that_was_killed_is_replaced_when_it_is_next_needed(launching: Launching) -> None:
    async with launching() as launch:
        await launch.up()
        os.kill(int((launch.folder / "guard").read_text()), signal.SIGKILL)
        os.kill(launch.pids("worker")[0], signal.SIGKILL)
        await launch.until(lambda: len(launch.pids("worker")) == 2, "it is back")
        launch.process.kill()
        await launch.ended()
        await launch.left_nothing()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
