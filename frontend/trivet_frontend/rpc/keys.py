"""The API key on the public gRPC API: metadata `authorization: Bearer KEY`, as on HTTP."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from trivet_chassis.rpc import abort
from trivet_proto.errors import ErrorKind, TrivetError

_OPEN_METHODS = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the keys; health and reflection are open. Keys are kept as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_METHODS) or self._known(handler_call_details):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse, handler.request_deserializer, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(_refuse, handler.request_deserializer, handler.response_serializer)

    def _known(self, details: grpc.HandlerCallDetails) -> bool:
        given = next((value for name, value in details.invocation_metadata or () if name == "authorization"), "")
        scheme, _, key = str(given).partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that time says nothing about which one came near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


async def _refuse(request: Any, context: Any) -> None:
    await abort(context, TrivetError(ErrorKind.UNAUTHENTICATED, "an API key is needed: send the metadata authorization: Bearer KEY"))
