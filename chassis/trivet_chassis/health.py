"""The gRPC health of a process: whether it lives, and whether a request sent now would be served.

Three names answer the health protocol: `live`, which is SERVING from the start of the server until its end; `ready`; and "" with the
services' full names, which say the same as `ready`. What makes a service ready is its own affair. How steps progress is asked over HTTP
(`metrics.py`).
"""

from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

LIVE = "live"
READY = "ready"


class Health:
    """Owned by an `RpcServer`; the service tells it when readiness changes."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = (READY, "", *services)
        self.servicer = health.aio.HealthServicer()
        self.is_live = False
        self.is_ready = False

    async def live(self) -> None:
        """The server answers; said once, by the server itself."""
        self.is_live = True
        await self.servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)

    async def ready(self, is_ready: bool, /) -> None:
        """Whether a request sent now would be served; saying the same again costs nothing."""
        self.is_ready = is_ready
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)
