"""The scheduler's process: health, pauses, and how it leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from deployed import deployment
from played import SOON_S, PlayedFrontend, PlayedWorker, until
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.rpc import create_channel, is_serving
from trivet_proto.errors import ErrorKind
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.server import serve


@dataclass
class Running:
    """A scheduler that serves."""

    address: str
    page: Path
    lifecycle: Lifecycle
    ended: asyncio.Task[None]
    playing: list[asyncio.Task[None]] = field(default_factory=list)

    def play(self, peer: PlayedWorker | PlayedFrontend) -> None:
        self.playing.append(asyncio.create_task(peer.run()))

    async def get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_unix_connection(str(self.page))
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        head, body = (await reader.read()).decode().split("\r\n\r\n", 1)
        writer.close()
        return int(head.split()[1]), body

    async def is_ready(self) -> bool:
        by_name = [await is_serving(self.address, service=name) for name in ("", "ready", "trivet.v1.EngineService")]
        assert len(set(by_name)) == 1
        assert ((await self.get("/health/ready"))[0] == 200) is by_name[0]
        return by_name[0]

    async def until_ready(self, is_ready: bool, /) -> None:
        async with asyncio.timeout(SOON_S):
            while await is_serving(self.address) is not is_ready:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(tmp_path: Path, **settings: object) -> AsyncIterator[Running]:
    address, page = f"unix:{tmp_path / 's.sock'}", tmp_path / "m.sock"
    lifecycle = Lifecycle()
    chosen = SchedulerSettings(listen=address, metrics_listen=f"unix:{page}", **settings)  # type: ignore[arg-type]
    task = asyncio.create_task(serve(chosen, lifecycle))
    async with asyncio.timeout(SOON_S):
        while not await is_serving(address, service="live"):
            await asyncio.sleep(0.01)
    scheduler = Running(address, page, lifecycle, task)
    try:
        yield scheduler
    finally:
        for playing in scheduler.playing:
            playing.cancel()
        await asyncio.gather(*scheduler.playing, return_exceptions=True)
        lifecycle.draining.set()
        await task
        await lifecycle.cancel_tasks()


async def test_live_is_at_once_and_ready_with_the_first_worker(tmp_path: Path) -> None:
    async with running(tmp_path) as scheduler, create_channel(scheduler.address) as channel:
        assert await scheduler.get("/health/live") == (200, "live\n")
        assert not await scheduler.is_ready()
        worker = PlayedWorker(channel)
        scheduler.play(worker)
        await scheduler.until_ready(True)
        assert await scheduler.is_ready()
        status, body = await scheduler.get("/health/progress")
        assert (status, json.loads(body)) == (200, {"busy": False, "last_step_age_ms": None})
        page = (await scheduler.get("/metrics"))[1]
        for name in (
            "trivet_streams 1.0",
            "trivet_blocks_in_use 0.0",
            "trivet_tasks ",
            "process_open_fds ",
            "trivet_replicas_lost_total 0.0",
        ):
            assert f"\n{name}" in page
        worker.say(draining=types_pb2.Draining(deadline_ms=60_000))
        await scheduler.until_ready(False)
        assert await is_serving(scheduler.address, service="live")


async def test_progress_says_how_long_a_step_is_unanswered(tmp_path: Path) -> None:
    async with running(tmp_path, first_step_timeout=60.0) as scheduler, create_channel(scheduler.address) as channel:
        worker, frontend = PlayedWorker(channel), PlayedFrontend(channel)
        scheduler.play(worker)
        await until(worker.ready.is_set)
        worker.go.clear()
        scheduler.play(frontend)
        await until(lambda: frontend.card is not None)
        frontend.add([1], [1, 2, 3], 5)
        await until(lambda: worker.num_held)
        status, body = await scheduler.get("/health/progress")
        assert status == 200
        assert json.loads(body)["busy"] is True
        assert json.loads(body)["last_step_age_ms"] >= 0
        worker.go.set()
        await frontend.until_finished(1)


async def test_a_drain_hands_back_what_waits_at_once_and_what_runs_at_the_deadline(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout=2.0) as scheduler, create_channel(scheduler.address) as channel:
        worker, frontend = PlayedWorker(channel), PlayedFrontend(channel)
        scheduler.play(worker)
        await until(worker.ready.is_set)
        worker.most_answers = 4
        scheduler.play(frontend)
        await until(lambda: frontend.card is not None)
        for handle in range(1, 13):  # eight run at once
            frontend.add([handle], [1, 2, 3], 40)
        await until(lambda: worker.answered == 4)
        scheduler.lifecycle.draining.set()
        await until(lambda: frontend.draining is not None and len(frontend.errors) == 4)
        assert frontend.draining.deadline_ms == 2000
        assert worker.drains
        frontend.add([20], [1], 1)
        await frontend.until_finished(20)
        await until(frontend.ended.is_set)
        assert len(frontend.finishes) == 13, "each is told before the session ends"
        assert {(error.kind, error.retryable) for error in frontend.errors.values()} == {(types_pb2.ERROR_KIND_UNAVAILABLE, True)}
        assert len(frontend.errors) == 13
        assert frontend.error.kind is ErrorKind.UNAVAILABLE
        await until(worker.ended.is_set)
        assert worker.error.kind is ErrorKind.UNAVAILABLE
        async with asyncio.timeout(SOON_S):
            await scheduler.ended


async def test_a_drain_lets_what_runs_finish(tmp_path: Path) -> None:
    async with running(tmp_path) as scheduler, create_channel(scheduler.address) as channel:
        worker, frontend = PlayedWorker(channel), PlayedFrontend(channel)
        scheduler.play(worker)
        await until(worker.ready.is_set)
        worker.go.clear()
        scheduler.play(frontend)
        await until(lambda: frontend.card is not None)
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        scheduler.lifecycle.draining.set()
        await until(lambda: frontend.draining is not None)
        await scheduler.until_ready(False)
        worker.go.set()
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 23))
        async with asyncio.timeout(SOON_S):
            await scheduler.ended


async def test_a_pause_keeps_what_runs_where_it_is_until_it_is_resumed(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        await stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_KEEP))
        worker.go.set()
        await until(lambda: not deployed.engine.links[0].replica.flights)
        frontend.add([2], [1, 2, 3], 5)
        await until(lambda: len(deployed.engine.core.requests) == 2)
        assert worker.answered <= 2
        assert not frontend.finishes
        assert (await stub.GetLoad(engine_pb2.GetLoadRequest())).load.paused
        await stub.Resume(engine_pb2.ResumeRequest())
        await frontend.until_finished(1, 2)
        assert frontend.tokens == {1: list(range(3, 23)), 2: list(range(3, 8))}


async def test_a_pause_that_waits_returns_when_nothing_runs_and_starts_nothing_new(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        pause = asyncio.ensure_future(stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_WAIT)))
        await until(lambda: deployed.engine.core.paused)
        frontend.add([2], [1, 2, 3], 5)
        worker.go.set()
        await pause
        await frontend.until_finished(1)
        assert deployed.engine.is_quiet
        assert 2 not in frontend.finishes
        await stub.Resume(engine_pb2.ResumeRequest())
        await frontend.until_finished(2)


async def test_a_pause_that_waits_is_told_when_somebody_resumes(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        pause = asyncio.ensure_future(stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_WAIT)))
        await until(lambda: deployed.engine.core.paused)
        await stub.Resume(engine_pb2.ResumeRequest())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await pause
        assert ended.value.code() is grpc.StatusCode.ABORTED


async def test_a_pause_that_aborts_ends_everything(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        for handle in range(1, 13):
            frontend.add([handle], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        await until(lambda: len(deployed.engine.core.requests) == 12)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        await stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_ABORT))
        await frontend.until_finished(*range(1, 13))
        assert set(frontend.finishes.values()) == {types_pb2.FINISH_REASON_ABORT}
