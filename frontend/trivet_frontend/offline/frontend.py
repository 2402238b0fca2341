"""A frontend without a door: the engine client, the model that it serves and the road to it, for a caller in the same process."""

import asyncio
from types import TracebackType

import msgspec
from trivet_chassis.clock import SystemClock
from trivet_chassis.metrics import create_registry
from trivet_chassis.rpc import Dial, create_channel

from trivet_frontend.config import FrontendSettings
from trivet_frontend.engine import EngineClient, identity_of
from trivet_frontend.serving import FollowedModel, Inference


class OfflineFrontend:
    """Use as an async context manager; leaving it ends what still runs."""

    def __init__(self, settings: FrontendSettings, *, dial: Dial = create_channel) -> None:
        """`dial` reaches the schedulers of the settings. Raises INVALID_ARGUMENT for a template that cannot be read."""
        settings = msgspec.structs.replace(settings, exit_on_unreadable_model=True)  # its caller waits for this model and no other
        clock = SystemClock()
        self._engine = EngineClient(
            settings.scheduler,
            identity=identity_of(settings.name),
            clock=clock,
            slow_client_timeout=settings.slow_client_timeout,
            handover_timeout=settings.handover_timeout,
            dial=dial,
        )
        self.inference = Inference(self._engine, clock=clock, max_requests=settings.max_requests, request_timeout=settings.request_timeout)
        self._model = FollowedModel(self._engine, self.inference, settings, create_registry("frontend"), clock=clock)
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "OfflineFrontend":
        self._engine.start()
        self._following = asyncio.create_task(self._model.follow(), name="follow the model")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._engine.close()
        self._model.close()

    async def until_ready(self) -> None:
        """Return when a request sent now would be served. Raises INVALID_ARGUMENT for a model that cannot be read."""
        changes = self._engine.changes
        while True:
            seen = changes.count
            if self._model.refusal is not None:
                raise self._model.refusal
            if self.inference.ready:
                return
            await changes.after(seen)
