"""Errors over gRPC, both ways: what a handler raises becomes a status with our error in its trailing metadata, and a `TrivetError` again.

`ErrorInterceptor` also puts the caller's request id (metadata `x-request-id`, or one of our own making) on everything the call logs.
An exception that nobody foresaw is logged here, with its traceback; the caller gets INTERNAL and the request id, nothing else.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from trivet_proto.call_errors import ERROR_KEY, error_of
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_chassis.logging import request_id
from trivet_chassis.request_ids import accepted_request_id

__all__ = ["ERROR_KEY", "REQUEST_ID_KEY", "ErrorInterceptor", "abort", "error_of", "request_id_metadata"]

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"

MAX_ERROR_TEXT_BYTES = 1024
"""The text travels twice, in status and metadata, and may grow threefold in the status: gRPC takes 8 KiB of both together."""

_UNSERVED = "Method not implemented!"  # what generated servicers raise for a method without a handler

_Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: _Context, error: TrivetError) -> None:
    """End the call with the error's status and the error itself in the trailing metadata. Always raises gRPC's AbortError."""
    carried = TrivetError(
        error.kind,
        _carriable(error.message),
        param=None if error.param is None else _carriable(error.param),
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
    )
    await context.abort(error.appearance.grpc_status, carried.message, ((ERROR_KEY, carried.to_proto().SerializeToString()),))


def request_id_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata for a call made on behalf of the request at hand, so that the other service logs the same id."""
    current = request_id.get()
    return ((REQUEST_ID_KEY, current),) if current else ()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what handlers raise; gives each call a request id; ends streams whose peer does not read them."""

    def __init__(self, write_timeout_s: float | None = None) -> None:
        self._write_timeout_s = write_timeout_s

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
            return wrap(_guard_stream(inner, method, self._write_timeout_s), handler.request_deserializer, handler.response_serializer)
        wrap = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return wrap(_guard_unary(inner, method), handler.request_deserializer, handler.response_serializer)


def _guard_unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: _Context) -> Any:
        _take_request_id(context)
        try:
            return await inner(request, context)
        except Exception as error:
            await _end(context, error, method)

    return call


def _guard_stream(inner: Callable[..., Any], method: str, write_timeout_s: float | None) -> Callable[..., Any]:
    # Not a generator: a call that is cancelled while a message is being written would leave a generator to the garbage collector,
    # and the handler's own clean-up with it.
    async def call(request: Any, context: _Context) -> None:
        _take_request_id(context)
        try:
            answers = inner(request, context)
            if hasattr(answers, "__aiter__"):
                await _write_all(answers, context, write_timeout_s)
            else:
                await answers  # a handler that writes by itself
        except Exception as error:
            await _end(context, error, method)

    return call


async def _write_all(answers: AsyncIterator[Any], context: _Context, timeout_s: float | None) -> None:
    if not isinstance(answers, AsyncGenerator):
        async for answer in answers:
            await _write(answer, context, timeout_s)
        return
    async with aclosing(answers) as closing:
        async for answer in closing:
            await _write(answer, context, timeout_s)


async def _write(answer: Any, context: _Context, timeout_s: float | None) -> None:
    if timeout_s is None:
        await context.write(answer)
        return
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(answer)
    except TimeoutError:
        raise TrivetError(ErrorKind.CANCELLED, f"the caller has not read its stream for {timeout_s:g} s") from None


async def _end(context: _Context, error: Exception, method: str) -> None:
    if isinstance(error, TrivetError):
        if error.appearance.http_status >= 500:
            logger.warning("%s: %s: %s", method, error.kind.name, error.message)
        await abort(context, error)
    if isinstance(error, NotImplementedError) and str(error) == _UNSERVED:
        await abort(context, TrivetError(ErrorKind.UNIMPLEMENTED, f"{method} is not served here"))
    if isinstance(error, grpc.aio.AbortError):
        raise error
    logger.error("%s failed", method, exc_info=error)
    await abort(
        context, TrivetError(ErrorKind.INTERNAL, f"an internal error; the service's log has it under request id {request_id.get()}")
    )


def _take_request_id(context: _Context) -> None:
    given = next((value for key, value in context.invocation_metadata() or () if key == REQUEST_ID_KEY), "")
    request_id.set(accepted_request_id(given if isinstance(given, str) else ""))


def _carriable(text: str) -> str:
    """Short enough, and without the lone surrogates that JSON lets a user send and protobuf refuses."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_ERROR_TEXT_BYTES:
        return encoded.decode()
    return encoded[: MAX_ERROR_TEXT_BYTES - 3].decode(errors="ignore") + "…"
