"""What a failed gRPC call says of itself: the `TrivetError` in its trailing metadata, or the nearest kind for a status of gRPC's own.

Read by the services' channels and by the SDK alike; how a service sends its errors is the chassis's affair.
"""

from collections.abc import Iterable
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2

ERROR_KEY = "trivet-error-bin"
"""Trailing metadata with a serialized `trivet.v1.Error`."""

_Code = grpc.StatusCode
_KINDS_OF_BARE_STATUS = {
    _Code.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    _Code.OUT_OF_RANGE: ErrorKind.INVALID_ARGUMENT,
    _Code.NOT_FOUND: ErrorKind.NOT_FOUND,
    _Code.ALREADY_EXISTS: ErrorKind.ALREADY_EXISTS,
    _Code.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    _Code.PERMISSION_DENIED: ErrorKind.PERMISSION_DENIED,
    _Code.RESOURCE_EXHAUSTED: ErrorKind.TOO_LARGE,  # gRPC's own message limit
    _Code.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    _Code.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    _Code.CANCELLED: ErrorKind.CANCELLED,
    _Code.UNIMPLEMENTED: ErrorKind.UNIMPLEMENTED,
    _Code.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
    _Code.ABORTED: ErrorKind.ABORTED,
}


class FailedCall(Protocol):
    """What `grpc.aio.AioRpcError` and the failed calls of synchronous gRPC have in common."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def error_of(failure: FailedCall) -> TrivetError:
    """The error that the other side raised, or the nearest kind for a status of gRPC's own."""
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return TrivetError.from_proto(types_pb2.Error.FromString(value))
            except DecodeError:
                break  # a stranger's metadata: the status has to do
    kind = _KINDS_OF_BARE_STATUS.get(failure.code(), ErrorKind.INTERNAL)
    return TrivetError(kind, failure.details() or failure.code().name)
