"""One hierarchy of errors for all services, and the one table of how each kind looks on gRPC, on HTTP and in OpenAI's error body.

The client's fault is 4xx with the parameter's name and what would have been right; 5xx is ours. `TrivetError` is what a user or a peer can
cause; invariants are asserted instead.
"""

from dataclasses import dataclass
from enum import IntEnum

import grpc

from trivet_proto.v1 import types_pb2


class ErrorKind(IntEnum):
    """Mirrors `trivet.v1.ErrorKind`; a test holds the two together."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    MODEL_NOT_FOUND = 2
    NOT_FOUND = 3
    ALREADY_EXISTS = 4
    UNAUTHENTICATED = 5
    PERMISSION_DENIED = 6
    TOO_LARGE = 7
    OVERLOADED = 8
    UNAVAILABLE = 9
    DEADLINE_EXCEEDED = 10
    CANCELLED = 11
    UNIMPLEMENTED = 12
    FAILED_PRECONDITION = 13
    ABORTED = 14
    OUT_OF_MEMORY = 15
    NON_FINITE = 16
    INTERNAL = 17
    METHOD_NOT_ALLOWED = 18


@dataclass(frozen=True, slots=True)
class Appearance:
    """How an error kind looks outside."""

    grpc_status: grpc.StatusCode
    http_status: int
    openai_type: str
    openai_code: str | None
    retryable: bool = False


_Code = grpc.StatusCode

APPEARANCES: dict[ErrorKind, Appearance] = {
    ErrorKind.UNSPECIFIED: Appearance(_Code.INTERNAL, 500, "server_error", "internal_error"),
    ErrorKind.INVALID_ARGUMENT: Appearance(_Code.INVALID_ARGUMENT, 400, "invalid_request_error", None),
    ErrorKind.MODEL_NOT_FOUND: Appearance(_Code.NOT_FOUND, 404, "invalid_request_error", "model_not_found"),
    ErrorKind.NOT_FOUND: Appearance(_Code.NOT_FOUND, 404, "invalid_request_error", "not_found"),
    ErrorKind.ALREADY_EXISTS: Appearance(_Code.ALREADY_EXISTS, 409, "invalid_request_error", "already_exists"),
    ErrorKind.UNAUTHENTICATED: Appearance(_Code.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"),
    ErrorKind.PERMISSION_DENIED: Appearance(_Code.PERMISSION_DENIED, 403, "permission_error", "permission_denied"),
    ErrorKind.TOO_LARGE: Appearance(_Code.RESOURCE_EXHAUSTED, 413, "invalid_request_error", "request_too_large"),
    ErrorKind.OVERLOADED: Appearance(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded", retryable=True),
    ErrorKind.UNAVAILABLE: Appearance(_Code.UNAVAILABLE, 503, "server_error", "unavailable", retryable=True),
    ErrorKind.DEADLINE_EXCEEDED: Appearance(_Code.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded"),
    ErrorKind.CANCELLED: Appearance(_Code.CANCELLED, 499, "invalid_request_error", "cancelled"),
    ErrorKind.UNIMPLEMENTED: Appearance(_Code.UNIMPLEMENTED, 501, "invalid_request_error", "not_served"),
    ErrorKind.FAILED_PRECONDITION: Appearance(_Code.FAILED_PRECONDITION, 409, "invalid_request_error", "failed_precondition"),
    ErrorKind.ABORTED: Appearance(_Code.ABORTED, 409, "server_error", "aborted", retryable=True),
    ErrorKind.OUT_OF_MEMORY: Appearance(_Code.RESOURCE_EXHAUSTED, 503, "server_error", "out_of_memory", retryable=True),
    ErrorKind.NON_FINITE: Appearance(_Code.INTERNAL, 500, "server_error", "non_finite_logits"),
    ErrorKind.INTERNAL: Appearance(_Code.INTERNAL, 500, "server_error", "internal_error"),
    ErrorKind.METHOD_NOT_ALLOWED: Appearance(_Code.UNIMPLEMENTED, 405, "invalid_request_error", "method_not_allowed"),
}


class TrivetError(Exception):
    """An error that a user or a peer can cause.

    `param` is the public name of the field at fault; `retryable` defaults to the kind's own; `retry_after_ms` says when to come back.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retryable: bool | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retryable = APPEARANCES[kind].retryable if retryable is None else retryable
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> str | tuple[object, ...]:
        return _rebuild, (self.kind, self.message, self.param, self.retryable, self.retry_after_ms)

    @property
    def appearance(self) -> Appearance:
        return APPEARANCES[self.kind]

    def to_proto(self) -> types_pb2.Error:
        message = types_pb2.Error(
            kind=types_pb2.ErrorKind.ValueType(int(self.kind)), message=self.message, param=self.param or "", retryable=self.retryable
        )
        if self.retry_after_ms is not None:
            message.retry_after_ms = self.retry_after_ms
        return message

    @classmethod
    def from_proto(cls, message: types_pb2.Error) -> "TrivetError":
        known = message.kind in ErrorKind._value2member_map_
        return cls(
            ErrorKind(message.kind) if known else ErrorKind.INTERNAL,  # a newer peer's kind
            message.message,
            param=message.param or None,
            retryable=message.retryable,
            retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        )


def invalid(message: str, param: str | None = None) -> TrivetError:
    """The client's most common fault: a field that can never be right as it stands."""
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=param)


def _rebuild(kind: ErrorKind, message: str, param: str | None, retryable: bool, retry_after_ms: int | None) -> TrivetError:
    return TrivetError(kind, message, param=param, retryable=retryable, retry_after_ms=retry_after_ms)
