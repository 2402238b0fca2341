"""The frontend's life: dial the schedulers, learn the model, open the doors, serve, drain, leave.

HTTP opens at once and says that it is not ready; requests are served when a scheduler has a model and a ready worker. On the first signal
readiness turns 503 and new requests are refused, running ones finish within the drain limit, the rest end with an error.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from trivet_chassis.addresses import Address, parse_address, refuse_public
from trivet_chassis.clock import Clock, SystemClock
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.metrics import create_registry
from trivet_chassis.rpc import RpcServer, create_server
from trivet_proto.errors import TrivetError, invalid
from trivet_proto.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

from trivet_frontend.config import FrontendSettings
from trivet_frontend.engine import EngineClient, identity_of, software_version
from trivet_frontend.openai import ConnectionLimits, Gateway, GatewaySettings, HttpListener, UnknownFields, create_app
from trivet_frontend.rpc import KeyInterceptor, PublicInference
from trivet_frontend.serving import FollowedModel, Inference

logger = logging.getLogger(__name__)

SERVICE_NAME = "trivet.v1.InferenceService"
WAY_OUT = "set api_key, or insecure if that is meant"
# Streams that the drain has ended with an error get so long to be written out.
FAREWELL_SECONDS = 1.0


class Frontend:
    """All that one frontend process runs."""

    def __init__(self, settings: FrontendSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._registry: CollectorRegistry = create_registry("frontend")
        if not settings.scheduler:
            raise invalid("at least one scheduler is needed", "scheduler")
        self._engine = EngineClient(
            settings.scheduler,
            identity=identity_of(settings.name),
            clock=clock,
            slow_client_timeout=settings.slow_client_timeout,
            handover_timeout=settings.handover_timeout,
        )
        self.inference = Inference(self._engine, clock=clock, max_requests=settings.max_requests, request_timeout=settings.request_timeout)
        served = Gauge("trivet_streams", "Calls of clients that are being served.", registry=self._registry)
        streams = self.inference.streams
        served.set_function(lambda: streams.count)
        self._model = FollowedModel(self._engine, self.inference, settings, self._registry, clock=clock)
        self._http_address = (
            parse_address(f"unix:{Path(settings.uds).absolute()}", "uds")
            if settings.uds
            else Address(host=settings.host, port=settings.port)
        )
        self._http: HttpListener | None = None
        self._rpc: RpcServer | None = None

    # ---- start ----

    async def start(self) -> None:
        """Open the doors and begin to dial; returns before the model is known."""
        settings = self._settings
        keys = tuple(key for key in settings.api_key if key)
        allowed = settings.insecure or bool(keys)
        refuse_public(self._http_address, "host", allowed=allowed, way_out=WAY_OUT)
        if settings.grpc_listen:
            refuse_public(parse_address(settings.grpc_listen, "grpc_listen"), "grpc_listen", allowed=allowed, way_out=WAY_OUT)
            await self._start_rpc(settings.grpc_listen, keys)
        await self._start_http(keys)
        self._engine.start()

    async def _start_rpc(self, listen: str, keys: tuple[str, ...]) -> None:
        servicer = PublicInference(self.inference)
        self._rpc = await create_server(
            listen,
            register=lambda server: add_InferenceServiceServicer_to_server(servicer, server),
            services=[SERVICE_NAME],
            interceptors=[KeyInterceptor(keys)] if keys else [],
            write_timeout_s=self._settings.slow_client_timeout,
        )
        await self._rpc.start()

    async def _start_http(self, keys: tuple[str, ...]) -> None:
        settings = self._settings
        gateway = Gateway(
            self.inference,
            self._registry,
            GatewaySettings(
                body_limit=settings.max_body_bytes,
                unknown_fields=UnknownFields(settings.unknown_fields),
                version=software_version(),
                body_timeout=settings.body_timeout,
                keepalive=settings.sse_keepalive,
                slow_client_timeout=settings.slow_client_timeout,
            ),
        )
        app = create_app(gateway, api_keys=keys, allowed_origins=settings.allowed_origins)
        limits = ConnectionLimits(connections=settings.max_connections, header_timeout=settings.header_timeout)
        self._http = HttpListener(app, self._http_address, root_path=settings.root_path, limits=limits)
        await self._http.start()

    @property
    def http_url(self) -> str:
        """Where the HTTP API is; a port of 0 has become the one taken."""
        assert self._http is not None
        address = self._http.address
        return str(address) if address.is_unix else f"http://{address}"

    @property
    def grpc_address(self) -> str:
        return "" if self._rpc is None else str(self._rpc.address)

    # ---- serve ----

    async def follow_engine(self) -> None:
        """Keep what is served and the gRPC health in step with the schedulers; runs until cancelled."""
        # Readiness by itself: a model that takes its time to come must not keep a scheduler's loss from showing.
        await asyncio.gather(self._model.follow(), self._follow_readiness())

    async def _follow_readiness(self) -> None:
        changes = self._engine.changes
        while True:
            seen, ready = changes.count, self.inference.ready
            if self._rpc is not None and self._rpc.health.is_ready != ready:
                await self._rpc.health.ready(ready)
            await changes.after(seen)

    async def until_displaced(self) -> TrivetError:
        """Why this frontend must leave, once another process has taken its name at a scheduler."""
        return await self._engine.until_displaced()

    async def until_unreadable(self) -> TrivetError:
        """Why the first model that came cannot be served, where the settings make that the end."""
        changes = self._engine.changes
        while self._model.refusal is None:
            await changes.after(changes.count)
        return self._model.refusal

    # ---- leave ----

    async def drain(self) -> None:
        """Take no new requests and let running ones finish within the limit."""
        limit = self._settings.drain_timeout
        self.inference.draining = True
        self._engine.announce_draining(int(1000 * limit))
        self._engine.changes.note()
        logger.info("draining: %d requests are running, they have %g s", self.inference.requests_inside, limit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self.inference.until_empty()

    async def stop(self) -> None:
        """End everything; what still runs ends with an error."""
        await self._engine.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.inference.until_empty()
        if self._rpc is not None:
            await self._rpc.stop(0.1)
        if self._http is not None:
            await self._http.stop()
        self._model.close()


async def serve(settings: FrontendSettings, lifecycle: Lifecycle) -> None:
    """Run a frontend until it is told to leave.

    Raises ALREADY_EXISTS when another process has taken its name at a scheduler, and INVALID_ARGUMENT for a model that cannot be read
    where the settings say so: to be mended, not to be retried.
    """
    frontend = Frontend(settings, clock=SystemClock())
    draining = asyncio.create_task(lifecycle.until_draining(), name="wait for the drain")
    displaced = asyncio.create_task(frontend.until_displaced(), name="wait for another frontend of this name")
    unreadable = asyncio.create_task(frontend.until_unreadable(), name="wait for a model that cannot be read")
    reasons = (displaced, unreadable)
    try:
        await frontend.start()
        logger.info("HTTP on %s, gRPC on %s", frontend.http_url, frontend.grpc_address or "no address")
        lifecycle.supervise(frontend.follow_engine(), "follow engine")
        await asyncio.wait({draining, *reasons}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            raise next(reason.result() for reason in reasons if reason.done())
        draining.result()
        await frontend.drain()
    finally:
        for task in (draining, *reasons):
            task.cancel()
        await asyncio.gather(draining, *reasons, return_exceptions=True)
        await frontend.stop()
