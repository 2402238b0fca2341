"""`/metrics` and the three kinds of health over plain HTTP, for services that have no web framework.

A small server: GET and HEAD only, one request a connection, bounded in size, time and connections. The registry belongs to the service;
nothing is global. Live means that the loop turns (this answers); ready and the age of the last step are the service's own word.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from trivet_proto.errors import invalid

from trivet_chassis.addresses import Address, parse_address
from trivet_chassis.progress import STEP_LIMIT_S, Measure, Progress, idle
from trivet_chassis.sockets import Identity, claim, identity_of, release

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024
HEAD_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64
_LINGER_BYTES = 64 * 1024
_LINGER_S = 0.5

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PATHS = ("/metrics", "/health", "/health/live", "/health/ready", "/health/progress")


def create_registry(service: str) -> CollectorRegistry:
    """A registry with what every process reports of itself."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    info = Gauge("trivet_build_info", "The software; always 1", ["service", "version"], registry=registry)
    info.labels(service, software_version()).set(1)
    Gauge("trivet_tasks", "Asyncio tasks that live", registry=registry).set_function(_live_tasks)
    return registry


def software_version() -> str:
    try:
        return version("trivet-chassis")
    except PackageNotFoundError:
        return "unknown"


def _live_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # asked outside a loop
        return 0


@dataclass(frozen=True, slots=True)
class _Response:
    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    headers: tuple[str, ...] = ()
    head_only: bool = False

    def encode(self) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Connection: close",
            *self.headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if self.head_only else self.body)


class MetricsServer:
    """Serves a registry. `ready` says whether a request sent now would be served; an empty address serves nothing.

    `progress` says whether there is work and how old the last step is, in seconds; over `step_limit_s` a busy service answers 503.
    `refresh` runs before each scrape, to set gauges that cost something.
    """

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        *,
        ready: Callable[[], bool],
        progress: Measure = idle,
        step_limit_s: float = STEP_LIMIT_S,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self._address = parse_address(listen, "metrics_listen") if listen else None
        self._registry = registry
        self._ready = ready
        self._progress = progress
        self._step_limit_s = step_limit_s
        self._refresh = refresh
        self._server: asyncio.Server | None = None
        self._socket_file: Identity | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address | None:
        """Where it listens; a port of 0 has become the one taken."""
        if self._address is None or self._address.is_unix or self._server is None:
            return self._address
        return Address(host=self._address.host, port=self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen. Raises INVALID_ARGUMENT when the address is taken."""
        if self._address is None:
            return
        try:
            if self._address.is_unix:
                claim(self._address.path)
                self._server = await asyncio.start_unix_server(self._accept, self._address.path, limit=MAX_HEAD_BYTES)
                self._socket_file = identity_of(self._address.path)
            else:
                self._server = await asyncio.start_server(self._accept, self._address.host, self._address.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise invalid(f"metrics_listen: cannot listen on {self._address}: {error.strerror or error}", "metrics_listen") from error

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._server is None or self._address is None:
            return
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None
        if self._address.is_unix:
            release(self._address.path, self._socket_file)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._handle(reader, writer), name="metrics connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                response = await self._answer(reader)
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    writer.write(response.encode())
                    await writer.drain()
                    await _linger(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> _Response:
        if len(self._connections) > MAX_CONNECTIONS:
            return _Response(HTTPStatus.SERVICE_UNAVAILABLE, b"too many connections\n", headers=("Retry-After: 1",))
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _Response(HTTPStatus.REQUEST_TIMEOUT, b"the head did not come\n")
        except asyncio.LimitOverrunError:
            return _Response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the head is over 16 KiB\n")
        except asyncio.IncompleteReadError:
            return _Response(HTTPStatus.BAD_REQUEST, b"the head is not complete\n")
        try:
            return self._respond(head)
        except Exception:
            logger.exception("the answer to a metrics or health request failed")
            return _Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"an internal error; the log has it\n")

    def _respond(self, head: bytes) -> _Response:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1") or not words[1].startswith("/"):
            return _Response(HTTPStatus.BAD_REQUEST, b"not HTTP/1\n")
        method, path = words[0], words[1].split("?", 1)[0]
        if path not in _PATHS:
            return _Response(HTTPStatus.NOT_FOUND, (", ".join(_PATHS) + "\n").encode(), head_only=method == "HEAD")
        if method not in ("GET", "HEAD"):
            return _Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n", headers=("Allow: GET, HEAD",))
        head_only = method == "HEAD"
        if path == "/metrics":
            if self._refresh is not None:
                self._refresh()
            return _Response(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_LATEST, head_only=head_only)
        if path == "/health/live":
            return _Response(HTTPStatus.OK, b"live\n", head_only=head_only)
        if path == "/health/progress":
            found = Progress(*self._progress(), self._step_limit_s)
            return _Response(found.status, found.body, _JSON, head_only=head_only)
        if self._ready():
            return _Response(HTTPStatus.OK, b"ready\n", head_only=head_only)
        return _Response(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n", head_only=head_only)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what the client still sends, a little of it: closing over unread bytes would reset the connection and lose our answer."""
    if writer.can_write_eof():
        writer.write_eof()
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (chunk := await reader.read(left)):
                left -= len(chunk)
