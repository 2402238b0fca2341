"""Trivet's Python SDK: `Client` and `AsyncClient` speak gRPC with a frontend.

Thin: it holds a channel and no state of requests. Text, templates and tokens are the server's.
"""

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_client.async_client import AsyncClient
from trivet_client.async_stream import AsyncEventStream
from trivet_client.client import Client
from trivet_client.connection import Tls
from trivet_client.errors import (
    AccessError,
    CancelledCallError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    NotServedError,
    OverloadedError,
    ServerError,
    UnavailableError,
)
from trivet_client.events import (
    Event,
    Finished,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from trivet_client.messages import Message, Tool, ToolCall
from trivet_client.models import Embeddings, Model, Tokens
from trivet_client.results import Answer, Choice, collect, collect_async
from trivet_client.retrying import RetryPolicy
from trivet_client.sampling import SamplingParams
from trivet_client.stream import EventStream

__all__ = [
    "AccessError",
    "Answer",
    "AsyncClient",
    "AsyncEventStream",
    "CancelledCallError",
    "Choice",
    "Client",
    "DeadlineExceededError",
    "Embeddings",
    "ErrorKind",
    "Event",
    "EventStream",
    "Finished",
    "InvalidRequestError",
    "Message",
    "Model",
    "NotFoundError",
    "NotServedError",
    "OverloadedError",
    "PromptLogprobs",
    "ReasoningDelta",
    "RetryPolicy",
    "SamplingParams",
    "ServerError",
    "Started",
    "TextDelta",
    "Tls",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "TrivetError",
    "UnavailableError",
    "Usage",
    "collect",
    "collect_async",
]
