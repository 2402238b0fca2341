"""What every HTTP request passes before its handler: a request id, and the key if the server has one.

Pure ASGI: nothing here buffers a body or wraps a stream.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from trivet_chassis.logging import request_id as request_id_variable
from trivet_chassis.request_ids import accepted_request_id
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.openai.errors import as_trivet_error, error_response
from trivet_frontend.serving import OpenStreams

REQUEST_ID_KEY = "trivet.request_id"
SEND_BODY_KEY = "trivet.send_body"
"""Of a request's scope: the way out past all that is wrapped around a handler, for a stream's many pieces, which nothing here looks at."""

_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/progress", "/ping", "/version", "/metrics"})


class RequestContext:
    """Gives each request its id and puts that into the answer's headers and on every log record."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id_of(scope)
        scope[REQUEST_ID_KEY], scope[SEND_BODY_KEY] = request_id, send
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        token = request_id_variable.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # nobody is left to answer
        finally:
            request_id_variable.reset(token)


class StreamCount:
    """Counts what is being served; who only looks after the server does not count."""

    def __init__(self, app: ASGIApp, streams: OpenStreams) -> None:
        self._app = app
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        with self._streams.open():
            await self._app(scope, receive, send)


class KeyCheck:
    """Refuses what comes without one of the keys; only health and metrics are open. Keys are kept as digests."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A browser asks with OPTIONS whether it may send its key at all.
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS" and not self._known(scope):
            error = TrivetError(ErrorKind.UNAUTHENTICATED, "an API key is needed: send the header Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, so that time says nothing about which one came near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class FaultBarrier:
    """Makes an error answer of whatever escapes a handler, so that a fault of ours never shows more than that it happened."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if started:
                raise
            await error_response(as_trivet_error(error))(scope, receive, send)


def _request_id_of(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return accepted_request_id(given.decode("latin-1"))
