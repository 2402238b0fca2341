"""What a call raises: one class for each thing that a caller does about an error, all of them `TrivetError`s.

The kind says what happened, the class what can be done. `param` names the field at fault, `retryable` says whether the same call may
succeed later, `retry_after_ms` from when on.
"""

from trivet_proto.call_errors import FailedCall, error_of
from trivet_proto.errors import ErrorKind, TrivetError


class _CallError(TrivetError):
    def __reduce__(self) -> str | tuple[object, ...]:
        return _rebuild, (self.kind, self.message, self.param, self.retryable, self.retry_after_ms)


class InvalidRequestError(_CallError):
    """The request can never succeed as it stands: `param` is the field to change."""


class NotFoundError(_CallError):
    """No such model, or no such thing."""


class AccessError(_CallError):
    """The API key is missing or wrong, or does not allow this."""


class NotServedError(_CallError):
    """The server or its model does not do this."""


class OverloadedError(_CallError):
    """A queue or the memory is full now; come back after `retry_after_ms`."""


class UnavailableError(_CallError):
    """Nobody could serve the request: the server cannot be reached, starts, drains or lost what it works with."""


class DeadlineExceededError(_CallError):
    """The call's `timeout` passed; the request was aborted."""


class CancelledCallError(_CallError):
    """The call was ended before its answer was complete: the stream or the client was closed, or the server cancelled it."""


class ServerError(_CallError):
    """The server's own fault; its log has more."""


CLASSES: dict[ErrorKind, type[_CallError]] = {
    ErrorKind.UNSPECIFIED: ServerError,
    ErrorKind.INVALID_ARGUMENT: InvalidRequestError,
    ErrorKind.MODEL_NOT_FOUND: NotFoundError,
    ErrorKind.NOT_FOUND: NotFoundError,
    ErrorKind.ALREADY_EXISTS: InvalidRequestError,
    ErrorKind.UNAUTHENTICATED: AccessError,
    ErrorKind.PERMISSION_DENIED: AccessError,
    ErrorKind.TOO_LARGE: InvalidRequestError,
    ErrorKind.OVERLOADED: OverloadedError,
    ErrorKind.UNAVAILABLE: UnavailableError,
    ErrorKind.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorKind.CANCELLED: CancelledCallError,
    ErrorKind.UNIMPLEMENTED: NotServedError,
    ErrorKind.FAILED_PRECONDITION: InvalidRequestError,
    ErrorKind.ABORTED: UnavailableError,
    ErrorKind.OUT_OF_MEMORY: OverloadedError,
    ErrorKind.NON_FINITE: ServerError,
    ErrorKind.INTERNAL: ServerError,
    ErrorKind.METHOD_NOT_ALLOWED: NotServedError,
}


def typed(error: TrivetError) -> TrivetError:
    """`error` as the class for its kind."""
    return _rebuild(error.kind, error.message, error.param, error.retryable, error.retry_after_ms)


def typed_failure(failure: FailedCall) -> TrivetError:
    """What a failed gRPC call raises here."""
    return typed(error_of(failure))


def invalid(message: str, param: str) -> InvalidRequestError:
    """A field that cannot be sent as it stands."""
    return InvalidRequestError(ErrorKind.INVALID_ARGUMENT, message, param=param)


def closed(message: str) -> CancelledCallError:
    """Something was asked of a stream or client that has been closed."""
    return CancelledCallError(ErrorKind.CANCELLED, message)


def misused(message: str) -> InvalidRequestError:
    """The client is used where it does not work."""
    return InvalidRequestError(ErrorKind.FAILED_PRECONDITION, message)


def _rebuild(kind: ErrorKind, message: str, param: str | None, retryable: bool, retry_after_ms: int | None) -> TrivetError:
    return CLASSES[kind](kind, message, param=param, retryable=retryable, retry_after_ms=retry_after_ms)
