"""The HTTP application: paths, middleware, error answers."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from trivet_proto.errors import TrivetError

from trivet_frontend.openai.errors import handle_http_exception, handle_trivet_error
from trivet_frontend.openai.gateway import Gateway
from trivet_frontend.openai.middleware import FaultBarrier, KeyCheck, RequestContext, StreamCount


def create_app(gateway: Gateway, *, api_keys: Sequence[str] = (), allowed_origins: Sequence[str] = ()) -> Starlette:
    """The application over `gateway`; keys and origins that are empty mean no check and no CORS."""
    routes = [
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/models", gateway.models, methods=["GET"]),
        # A model's name may hold slashes.
        Route("/v1/models/{name:path}", gateway.model, methods=["GET"]),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/health", gateway.ready, methods=["GET"]),
        Route("/health/live", gateway.live, methods=["GET"]),
        Route("/health/ready", gateway.ready, methods=["GET"]),
        Route("/health/progress", gateway.progress, methods=["GET"]),
        Route("/ping", gateway.ready, methods=["GET", "POST"]),
        Route("/version", gateway.version, methods=["GET"]),
        Route("/load", gateway.load, methods=["GET"]),
        Route("/metrics", gateway.metrics, methods=["GET"]),
    ]
    middleware = [Middleware(RequestContext), Middleware(StreamCount, streams=gateway.streams)]
    if allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        )
    if api_keys:
        middleware.append(Middleware(KeyCheck, keys=api_keys))
    middleware.append(Middleware(FaultBarrier))
    handlers = {TrivetError: handle_trivet_error, HTTPException: handle_http_exception}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
