"""`/metrics` and the three kinds of health over plain HTTP, for services that have no web framework.

A small server: GET only, one request a connection, bounded head, bounded time. The registry belongs to the service; nothing is global.
"""

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_chassis.addresses import Address, parse_address
from trivet_chassis.sockets import claim, release

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024
HEAD_TIMEOUT_S = 5.0


def create_registry(service: str) -> CollectorRegistry:
    """A registry with what every process reports of itself."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    info = Gauge("trivet_build_info", "The software; always 1", ["service", "version"], registry=registry)
    info.labels(service, software_version()).set(1)
    return registry


def software_version() -> str:
    try:
        return version("trivet-chassis")
    except PackageNotFoundError:
        return "unknown"


class MetricsServer:
    """Serves a registry. `ready` says whether a request sent now would be served; an empty address serves nothing."""

    def __init__(
        self, listen: str, registry: CollectorRegistry, *, ready: Callable[[], bool], refresh: Callable[[], None] | None = None
    ) -> None:
        self._address = parse_address(listen, "metrics_listen") if listen else None
        self._registry = registry
        self._ready = ready
        self._refresh = refresh
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> Address | None:
        """Where it listens; a port of 0 has become the one taken."""
        if self._address is None or self._address.is_unix or self._server is None:
            return self._address
        return Address(host=self._address.host, port=self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        if self._address is None:
            return
        try:
            if self._address.is_unix:
                claim(self._address.path)
                self._server = await asyncio.start_unix_server(self._handle, self._address.path, limit=MAX_HEAD_BYTES)
            else:
                self._server = await asyncio.start_server(self._handle, self._address.host, self._address.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise TrivetError(
                ErrorKind.INVALID_ARGUMENT, f"metrics_listen: cannot listen on {self._address}: {error.strerror}", param="metrics_listen"
            ) from error

    async def stop(self) -> None:
        if self._server is None or self._address is None:
            return
        self._server.close()
        await self._server.wait_closed()
        self._server = None
        if self._address.is_unix:
            release(self._address.path)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, kind, body = await self._answer(reader)
            head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        text = "text/plain; charset=utf-8"
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "431 Request Header Fields Too Large", text, b"the head is over 16 KiB\n"
        except asyncio.IncompleteReadError:
            return "400 Bad Request", text, b"the head is not complete\n"
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1"):
            return "400 Bad Request", text, b"not HTTP/1\n"
        if words[0] not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", text, b"GET only\n"
        path = words[1].split(b"?", 1)[0]
        if path == b"/metrics":
            if self._refresh is not None:
                self._refresh()
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == b"/health/live":
            return "200 OK", text, b"live\n"
        if path in (b"/health", b"/health/ready"):
            return ("200 OK", text, b"ready\n") if self._ready() else ("503 Service Unavailable", text, b"not ready\n")
        return "404 Not Found", text, b"/metrics, /health, /health/live, /health/ready\n"
