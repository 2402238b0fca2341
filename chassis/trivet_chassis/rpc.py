"""gRPC servers and channels, all made here, so that limits, keepalive and (one day) TLS are set in one place.

A server answers the gRPC health protocol (`health.py`: live from its start, ready when the service says so) and reflection, and maps
errors (`rpc_errors.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from trivet_proto.errors import invalid
from trivet_proto.limits import MAX_MESSAGE_BYTES

from trivet_chassis.addresses import Address, parse_address
from trivet_chassis.health import LIVE, READY, Health
from trivet_chassis.rpc_errors import ERROR_KEY, REQUEST_ID_KEY, ErrorInterceptor, abort, error_of, request_id_metadata
from trivet_chassis.sockets import Identity, claim, identity_of, release

__all__ = [
    "ERROR_KEY",
    "LIVE",
    "READY",
    "REQUEST_ID_KEY",
    "Dial",
    "ErrorInterceptor",
    "Health",
    "Register",
    "RpcServer",
    "abort",
    "create_channel",
    "create_server",
    "error_of",
    "is_serving",
    "request_id_metadata",
]

DRAIN_GRACE_S = 0.5

Dial: TypeAlias = Callable[[str], grpc.aio.Channel]
"""How a caller gets a channel to an address: `create_channel`, or that of an `InProcessServer`."""

_LIMITS = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
# Both ends ping a silent link, so that a peer that vanished without a word is noticed within half a minute.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    # A caller's id of many thousand characters is replaced, not a reason to refuse the call.
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.absolute_max_metadata_size", 64 * 1024),
]
_CHANNEL_OPTIONS = [
    *_LIMITS,
    *_KEEPALIVE,
    # A stream is taken up again by the service, which knows what was delivered; gRPC's own retries do not.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Every channel is a connection of its own: blobs do not hold up a session.
    ("grpc.use_local_subchannel_pool", 1),
]


class RpcServer:
    """A grpc.aio server with health and reflection, bound to one address."""

    def __init__(self, server: grpc.aio.Server, address: Address, health: Health, port: int) -> None:
        self._server = server
        self._address = address
        self._socket_file: Identity | None = identity_of(address.path) if address.is_unix else None
        self.health = health
        self.port = port

    @property
    def address(self) -> Address:
        """Where it listens; a port of 0 has become the one taken."""
        return self._address if self._address.is_unix else Address(host=self._address.host, port=self.port)

    async def start(self) -> None:
        """Answer; live from now on."""
        await self._server.start()
        await self.health.live()

    async def stop(self, grace_s: float = DRAIN_GRACE_S) -> None:
        """Take no new calls, give running ones `grace_s` seconds, cancel the rest."""
        await self.health.ready(False)
        await self._server.stop(grace_s)
        if self._address.is_unix:
            release(self._address.path, self._socket_file)


Register = Callable[[grpc.aio.Server], None]


async def create_server(
    listen: str,
    *,
    register: Register,
    services: Sequence[str],
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    write_timeout_s: float | None = None,
) -> RpcServer:
    """Bind a server. `register` adds the servicers; `services` are their full names, for health and reflection.

    A peer that takes no message of a stream for `write_timeout_s` seconds has its call ended with CANCELLED; None: the server waits.

    Raises INVALID_ARGUMENT when the address is malformed or taken.
    """
    address = parse_address(listen, "listen")
    if address.is_unix:
        claim(address.path)
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[ErrorInterceptor(write_timeout_s), *interceptors])
    own_health = Health(services)
    await own_health.ready(False)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(own_health.servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError as error:
        raise invalid(f"cannot listen on {address}: is another process there, or is the address not this machine's?", "listen") from error
    return RpcServer(server, address, own_health, port)


def create_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`; it dials when first used."""
    return grpc.aio.insecure_channel(parse_address(address).target, options=_CHANNEL_OPTIONS)


async def is_serving(address: str, timeout_s: float = 1.0, service: str = "") -> bool:
    """Whether the health service at `address` says SERVING now of `service`: `LIVE`, `READY`, or a service's name, which means ready."""
    async with create_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
