"""Services and their callers in one process: the stubs and servicers that elsewhere meet over gRPC, joined without a socket.

A server keeps the handlers that the generated `add_…Servicer_to_server` give it; its channels are what the generated stubs want of a
`grpc.aio.Channel`. A message is passed on as it is, not as bytes: what was sent belongs to whom it was sent to. All runs on one event loop.

Errors are those of `rpc_errors.py`: what a handler raises reaches the caller as an `AioRpcError` with our error in it. Deadlines are not
kept, since nothing travels; a stream whose reader is slow makes its writer wait, as gRPC's does.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from trivet_chassis.rpc_errors import ErrorInterceptor

AHEAD = 16
"""Messages that a stream may hold between its writer and its reader."""

Trailing = tuple[tuple[str, bytes], ...]


class InProcessServer:
    """Owns the handlers, and the calls that run."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}
        self._interceptor = ErrorInterceptor()
        self._calls: set[Call] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Part of what the generated code calls; the registered ones say the same by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def dial(self, address: str) -> grpc.aio.Channel:
        """A channel to this server, whatever the address: stands in for `create_channel`."""
        return cast(grpc.aio.Channel, _Channel(self))

    async def close(self) -> None:
        """End every call and wait for its handler."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*(call.ended() for call in calls))

    def start(self, method: str, request: Any) -> "Call":
        call = Call(self._guarded, method, request)
        self._calls.add(call)
        call.when_ended(self._calls.discard)
        return call

    async def _guarded(self, method: str) -> Callable[..., Any]:
        """What serves `method`, with errors mapped; called with the request and the context."""
        known = self._handlers[method]

        async def found(details: grpc.HandlerCallDetails) -> Any:
            return known

        guarded = await self._interceptor.intercept_service(found, _Details(method))
        return cast(Callable[..., Any], guarded.stream_stream or guarded.unary_stream or guarded.stream_unary or guarded.unary_unary)


class _Details(grpc.HandlerCallDetails):  # type: ignore[misc, unused-ignore]
    """What the interceptor reads of a call."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Channel:
    """What a stub and its user do with a channel; leaving it ends its calls."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server
        self._calls: set[Call] = set()

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *failure: object) -> None:
        for call in self._calls:
            call.cancel()

    def unary_unary(self, method: str, **serializers: object) -> "Callable[..., Call]":
        def start(request: Any = None, **options: object) -> Call:
            call = self._server.start(method, request)
            self._calls.add(call)
            call.when_ended(self._calls.discard)
            return call

        return start

    unary_stream = stream_unary = stream_stream = unary_unary


class Call:
    """The caller's end: it may be written to, read, iterated over or awaited, as its kind allows."""

    def __init__(self, find: Callable[[str], Awaitable[Callable[..., Any]]], method: str, request: Any) -> None:
        self._requests = _Pipe()
        self._answers = _Pipe()
        self._context = _Context(self._answers)
        self._task = asyncio.create_task(self._serve(find, method, self._requests if request is None else request), name=method)
        self._task.add_done_callback(self._end)  # not at the end of the work: a task may be cancelled before it has begun

    async def _serve(self, find: Callable[[str], Awaitable[Callable[..., Any]]], method: str, request: Any) -> None:
        handler = await find(method)
        try:
            answer = await handler(request, self._context)
        except grpc.aio.AbortError:
            return
        if answer is not None:
            await self._answers.put(answer)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._context.failure = _failure(grpc.StatusCode.CANCELLED, "the call was cancelled", ())
        self._answers.close()
        self._requests.close()

    def when_ended(self, then: "Callable[[Call], None]") -> None:
        self._task.add_done_callback(lambda task: then(self))

    async def ended(self) -> None:
        """Return when the handler has."""
        await asyncio.wait({self._task})

    def cancel(self) -> bool:
        return self._task.cancel()

    async def write(self, message: Any) -> None:
        await self._requests.put(message)

    async def read(self) -> Any:
        """The next answer, or `grpc.aio.EOF` at the end. Raises `AioRpcError` where the call has failed."""
        async for message in self._answers:
            return message
        if self._context.failure is not None:
            raise self._context.failure
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        """How the call has ended."""
        return grpc.StatusCode.OK if self._context.failure is None else self._context.failure.code()

    async def details(self) -> str:
        return "" if self._context.failure is None else self._context.failure.details() or ""

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()


class _Context:
    """The handler's end."""

    def __init__(self, answers: "_Pipe") -> None:
        self._answers = answers
        self.failure: grpc.aio.AioRpcError | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        """There is none to send: the caller sees at once that the call has been taken."""

    async def write(self, message: Any) -> None:
        await self._answers.put(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Trailing) -> NoReturn:
        self.failure = _failure(code, details, trailing)
        raise grpc.aio.AbortError(details)


class _Pipe:
    """Messages from one end to the other, in order; iterating ends when it has been closed and emptied."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def put(self, message: Any) -> None:
        """Waits while the reader is far behind. Raises InvalidStateError, as gRPC does, once the call has ended."""
        while len(self._messages) >= AHEAD and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            raise asyncio.InvalidStateError("the call has ended")
        self._messages.append(message)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    def __aiter__(self) -> "_Pipe":
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._changed.set()
        return self._messages.popleft()


def _failure(code: grpc.StatusCode, details: str, trailing: Trailing) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)
