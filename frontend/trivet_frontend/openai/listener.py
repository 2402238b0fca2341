"""The HTTP server under the application: one socket, httptools, and an end with a limit.

Signals are not taken here: the process' lifecycle has them, and drains before it stops this.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from trivet_chassis.addresses import Address
from trivet_chassis.sockets import claim, release
from trivet_proto.errors import invalid

from trivet_frontend.openai.connection import ConnectionLimits, LimitedConnection

KEEP_ALIVE_SECONDS = 75
# After the drain nothing should run; what does is cancelled.
SHUTDOWN_SECONDS = 2
BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves an application at one address."""

    def __init__(self, app: ASGIApp, address: Address, *, root_path: str, limits: ConnectionLimits) -> None:
        self._address = address
        config = uvicorn.Config(
            app,
            http=partial(LimitedConnection, limits),  # type: ignore[arg-type]  # called as the class would be
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            root_path=root_path,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        """Where it listens; a port of 0 has become the one taken."""
        if self._address.is_unix or self._socket is None:
            return self._address
        return Address(host=self._address.host, port=self._socket.getsockname()[1])

    async def start(self) -> None:
        """Listen; raises INVALID_ARGUMENT when the address is taken."""
        self._socket = _bound_socket(self._address)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._task is None or self._socket is None:
            return
        self._server.should_exit = True
        await self._task
        self._socket.close()
        if self._address.is_unix:
            release(self._address.path)


def _bound_socket(address: Address) -> socket.socket:
    bound: socket.socket | None = None
    try:
        if address.is_unix:
            claim(address.path)
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(address.path)
            # Whoever may enter the folder may call, as with a port.
            os.chmod(address.path, 0o666)
        else:
            family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
        bound.listen(BACKLOG)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise invalid(f"the HTTP API cannot listen on {address}: {error.strerror or error}", "port") from error
    bound.setblocking(False)
    return bound
