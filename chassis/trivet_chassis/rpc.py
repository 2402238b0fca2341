"""gRPC servers and channels, all made here, so that limits, keepalive and (one day) TLS are set in one place.

A server answers the gRPC health protocol (NOT_SERVING until `Health.serving`) and reflection. `ErrorInterceptor` turns a
`TrivetError` into its status; anything else that escapes a handler is logged here and reaches the client as INTERNAL without a traceback.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from trivet_proto.errors import APPEARANCES, ErrorKind, TrivetError
from trivet_proto.limits import MAX_MESSAGE_BYTES
from trivet_proto.v1 import types_pb2

from trivet_chassis.addresses import Address, parse_address
from trivet_chassis.logging import request_id
from trivet_chassis.sockets import claim, release

logger = logging.getLogger(__name__)

ERROR_KEY = "trivet-error-bin"
REQUEST_ID_KEY = "x-request-id"
DRAIN_GRACE_S = 0.5

_LIMITS = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
_SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
_CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class Health:
    """The gRPC health of a process and of each service that it names."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self.servicer = health.aio.HealthServicer()
        self.is_serving = False

    async def serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)
        self.is_serving = True

    async def not_serving(self) -> None:
        self.is_serving = False
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set(self, status: int) -> None:
        for name in self._services:
            await self.servicer.set(name, status)


class RpcServer:
    """A grpc.aio server with health and reflection, bound to one address."""

    def __init__(self, server: grpc.aio.Server, address: Address, health: Health, port: int) -> None:
        self._server = server
        self._address = address
        self.health = health
        self.port = port

    @property
    def address(self) -> Address:
        """Where it listens; a port of 0 has become the one taken."""
        return self._address if self._address.is_unix else Address(host=self._address.host, port=self.port)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float = DRAIN_GRACE_S) -> None:
        """Take no new calls, give running ones `grace_s` seconds, cancel the rest."""
        await self.health.not_serving()
        await self._server.stop(grace_s)
        if self._address.is_unix:
            release(self._address.path)


Register = Callable[[grpc.aio.Server], None]


async def create_server(
    listen: str, *, register: Register, services: Sequence[str], interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> RpcServer:
    """Bind a server. `register` adds the servicers; `services` are their full names, for health and reflection.

    Raises INVALID_ARGUMENT when the address is malformed or taken.
    """
    address = parse_address(listen, "listen")
    if address.is_unix:
        claim(address.path)
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[ErrorInterceptor(), *interceptors])
    own_health = Health(services)
    await own_health.not_serving()
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(own_health.servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError as error:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"cannot listen on {address}: is another process there?", param="listen") from error
    return RpcServer(server, address, own_health, port)


def create_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`; it dials when first used."""
    return grpc.aio.insecure_channel(parse_address(address).target, options=_CHANNEL_OPTIONS)


async def is_serving(address: str, timeout_s: float = 1.0, service: str = "") -> bool:
    """Whether the health service at `address` says SERVING now."""
    async with create_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def error_of(failure: grpc.aio.AioRpcError) -> TrivetError:
    """The error that the other side raised, or the nearest kind for a status of gRPC's own."""
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            return TrivetError.from_proto(types_pb2.Error.FromString(value))
    kinds = {appearance.grpc_status: kind for kind, appearance in reversed(APPEARANCES.items()) if kind is not ErrorKind.UNSPECIFIED}
    kinds[grpc.StatusCode.RESOURCE_EXHAUSTED] = ErrorKind.TOO_LARGE  # ours carry metadata; gRPC's own is the message limit
    return TrivetError(kinds.get(failure.code(), ErrorKind.INTERNAL), failure.details() or failure.code().name)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TrivetError) -> None:
    """End the call with the error's status and the error itself in the trailing metadata."""
    appearance = error.appearance
    trailing = ((ERROR_KEY, error.to_proto().SerializeToString()),)
    await context.abort(appearance.grpc_status, error.message, trailing)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what handlers raise; puts the caller's request id on the logs."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            wrap = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return wrap(_guard_stream(inner, method), handler.request_deserializer, handler.response_serializer)
        wrap = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return wrap(_guard_unary(inner, method), handler.request_deserializer, handler.response_serializer)


def _guard_unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _take_request_id(context)
        try:
            return await inner(request, context)
        except Exception as error:
            await _end(context, error, method)

    return call


def _guard_stream(inner: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        _take_request_id(context)
        try:
            answers = inner(request, context)
            if hasattr(answers, "__aiter__"):
                async for answer in answers:
                    yield answer
            else:
                await answers  # a handler that writes by itself
        except Exception as error:
            await _end(context, error, method)

    return call


async def _end(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, TrivetError):
        await abort(context, error)
    if isinstance(error, NotImplementedError):  # what generated servicers raise for methods without a handler
        await abort(context, TrivetError(ErrorKind.UNIMPLEMENTED, f"{method} is not served here"))
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError | asyncio.CancelledError):
        raise error
    logger.error("%s failed", method, exc_info=error)
    await abort(context, TrivetError(ErrorKind.INTERNAL, "an internal error; the service's log has it under this request id"))


def _take_request_id(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            request_id.set(value[:128])
