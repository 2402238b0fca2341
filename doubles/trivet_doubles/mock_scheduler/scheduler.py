"""The mock scheduler in a process: a gRPC server over what all its sessions share. An async context manager for tests."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc
from trivet_chassis.clock import Clock, SystemClock
from trivet_chassis.rpc import RpcServer, create_server
from trivet_proto.v1 import engine_pb2_grpc

from trivet_doubles.mock_scheduler.config import MockSchedulerSettings
from trivet_doubles.mock_scheduler.faults import Faults
from trivet_doubles.mock_scheduler.life import Life
from trivet_doubles.mock_scheduler.service import MockEngineService
from trivet_doubles.model import DoubleModel, load_double_model
from trivet_doubles.tokens import TokenLaw

DRAIN_POLL_S = 0.02
SERVICES = ("trivet.v1.EngineService",)


class MockScheduler:
    """A scheduler without workers. `on_death` is called when `die_after` comes; by default only that session ends."""

    def __init__(
        self,
        settings: MockSchedulerSettings,
        faults: Faults | None = None,
        *,
        model: DoubleModel | None = None,
        clock: Clock | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises INVALID_ARGUMENT for settings that cannot work. `faults`, where given, replace those of the settings."""
        self._settings = settings
        model = model or load_double_model(settings.model, is_synthetic=settings.synthetic)
        self.life = Life(settings, settings.faults if faults is None else faults, model, clock or SystemClock())
        # The calls that it leaves out answer UNIMPLEMENTED by themselves, which the stubs' types do not know.
        self._service = MockEngineService(self.life, on_death)  # type: ignore[abstract]
        self._server: RpcServer | None = None

    @property
    def law(self) -> TokenLaw:
        """What its tokens follow: `expected_output(..., law.choices)` says them beforehand."""
        return self.life.law

    @property
    def address(self) -> str:
        """Where it listens; a port of 0 has become the one taken."""
        assert self._server is not None, "it was started"
        return str(self._server.address)

    async def start(self) -> None:
        """Listen. Raises INVALID_ARGUMENT when the address is taken."""

        def register(server: grpc.aio.Server) -> None:
            engine_pb2_grpc.add_EngineServiceServicer_to_server(self._service, server)

        self._server = await create_server(self._settings.listen, register=register, services=SERVICES)
        await self._server.start()
        await self._server.health.ready(self._settings.replicas > 0)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new and let what runs go on; returns when nothing runs any more or the time is over."""
        assert self._server is not None, "it was started"
        self.life.draining = True
        await self._server.health.ready(False)
        self._service.announce_draining(int(timeout_s * 1000))
        end = self.life.clock.monotonic() + timeout_s
        while self.life.progress()[0] and self.life.clock.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """End all sessions and leave."""
        assert self._server is not None, "it was started"
        self._service.end_sessions()
        await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()
