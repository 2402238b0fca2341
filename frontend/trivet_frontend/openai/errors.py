"""Errors in OpenAI's shape.

What is a `TrivetError` is told to the caller as it stands; anything else is ours, is logged with its traceback, and the caller learns
only that.
"""

import logging
import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.openai.responses import ErrorAnswer, ErrorBlock, encode

logger = logging.getLogger(__name__)


def error_body(error: TrivetError) -> bytes:
    """`{"error": {message, type, param, code}}`."""
    look = error.appearance
    return encode(ErrorAnswer(ErrorBlock(error.message, look.openai_type, error.param, look.openai_code)))


def error_response(error: TrivetError) -> Response:
    headers: dict[str, str] = {}
    if error.retryable:
        seconds = 1 if error.retry_after_ms is None else max(1, math.ceil(error.retry_after_ms / 1000))
        headers["Retry-After"] = str(seconds)
    if error.kind is ErrorKind.TOO_LARGE:
        # What is left of the body is not read; the connection cannot carry another request.
        headers["Connection"] = "close"
    return Response(error_body(error), status_code=error.appearance.http_status, media_type="application/json", headers=headers)


def as_trivet_error(error: Exception) -> TrivetError:
    """`error` for the caller; logs what is our fault."""
    if isinstance(error, TrivetError):
        if error.appearance.http_status >= 500 and error.kind is not ErrorKind.UNAVAILABLE:
            logger.error("a request failed: %s", error.message)
        return error
    logger.error("a request failed", exc_info=error)
    return TrivetError(ErrorKind.INTERNAL, "the server failed to answer this request; its log has the details under the request id")


async def handle_trivet_error(request: Request, error: Exception) -> Response:
    return error_response(as_trivet_error(error))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router reports."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        found = TrivetError(ErrorKind.NOT_FOUND, f"there is nothing at {request.method} {request.url.path[:256]}")
    elif status == 405:
        found = TrivetError(ErrorKind.METHOD_NOT_ALLOWED, f"{request.url.path[:256]} does not take {request.method}")
    else:
        found = as_trivet_error(error)
    answer = error_response(found)
    if isinstance(error, HTTPException) and error.headers is not None and "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer
