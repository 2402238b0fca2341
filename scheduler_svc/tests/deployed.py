"""A scheduler's gRPC server with played peers around it, over a Unix socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from played import PlayedFrontend, PlayedWorker, until
from trivet_chassis.clock import SystemClock
from trivet_chassis.rpc import create_channel, create_server
from trivet_proto.v1 import engine_pb2_grpc, worker_pb2, worker_pb2_grpc
from trivet_scheduler.awake import STEADY, Pulse
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.rpc.engine_service import EngineService
from trivet_scheduler.rpc.worker_service import WorkerService


class Deployment:
    """A scheduler's server and what is played around it."""

    def __init__(self, engine: Engine, address: str, channel: grpc.aio.Channel, frontends: EngineService, workers: WorkerService) -> None:
        self.engine = engine
        self.address = address
        self.channel = channel
        self.frontends = frontends
        self.workers = workers
        self._playing: list[asyncio.Task[None]] = []

    @property
    def num_streams(self) -> int:
        return len(self.frontends.streams) + len(self.workers.streams)

    async def worker(self, name: str = "replica", hello: worker_pb2.WorkerHello | None = None) -> PlayedWorker:
        """A worker that is ready."""
        played = self.play(PlayedWorker(self.channel, name, hello))
        name = played.hello.hello.name
        await until(lambda: any(link.name == name for link in self.engine.links) or played.ended.is_set())
        assert played.error is None, played.error
        return played

    async def frontend(self, name: str = "frontend", channel: grpc.aio.Channel | None = None) -> PlayedFrontend:
        """A frontend with a session, which knows the model if there is one."""
        played = self.play(PlayedFrontend(channel or self.channel, name))
        await until(lambda: played.card is not None or (played.welcome is not None and self.engine.card is None))
        return played

    def play(self, played: "PlayedWorker | PlayedFrontend") -> "PlayedWorker | PlayedFrontend":  # type: ignore[type-var]
        self._playing.append(asyncio.create_task(played.run()))
        return played

    async def stop_playing(self) -> None:
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)


@asynccontextmanager
async def deployment(tmp_path: Path, pulse: Pulse = STEADY, **settings: object) -> AsyncIterator[Deployment]:
    address = f"unix:{tmp_path / 's.sock'}"
    engine = Engine(SchedulerSettings(listen=address, **settings), SystemClock(), pulse)  # type: ignore[arg-type]
    frontends, workers = EngineService(engine, "s"), WorkerService(engine, default_registry(), "s")

    def register(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(frontends, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server)

    server = await create_server(address, register=register, services=())
    await server.start()
    async with create_channel(address) as channel:
        played = Deployment(engine, address, channel, frontends, workers)
        try:
            yield played
        finally:
            await played.stop_playing()
            await server.stop(0)


@asynccontextmanager
async def running_request(tmp_path: Path) -> AsyncIterator[tuple[Deployment, grpc.aio.Channel]]:
    """A request in the middle of its run, which ends with all its tokens afterwards, and a channel for the offender."""
    async with deployment(tmp_path) as deployed, create_channel(deployed.address) as channel:
        worker, frontend = await deployed.worker("good worker"), await deployed.frontend("good frontend")
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        yield deployed, channel
        worker.go.set()
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 23))
        assert not frontend.ended.is_set()
        assert not worker.ended.is_set()
