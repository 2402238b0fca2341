"""A stream of events, asynchronous: one request, read event by event.

As `stream.py`, with the task in place of the thread: leaving an `async for` loop or an `async with` block, cancelling the task that reads,
or dropping the stream cancels the call, and the server aborts the request. One task reads a stream.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import grpc.aio
from trivet_proto.v1 import inference_pb2

from trivet_client.errors import closed, typed_failure
from trivet_client.events import Event, event_of
from trivet_client.retrying import Attempts
from trivet_client.stream import CLOSED_EARLY


class _Call(Protocol):
    def read(self) -> Awaitable[object]: ...

    def cancel(self) -> bool: ...


class AsyncEventStream(AsyncIterator[Event]):
    """Events of one request, the first of them `Started`.

    An `async for` loop that is left early ends the stream; to read on after some events, use `anext()`. Reading raises the typed errors of
    `trivet_client.errors`; reading on after an early close raises `CancelledCallError`.
    """

    def __init__(self, start: Callable[[float | None], _Call], attempts: Callable[[], Attempts]) -> None:
        self._start = start
        self._new_attempts = attempts
        self._attempts: Attempts | None = None
        self._call: _Call | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received = False
        self._ended = False
        self._closing = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Event]:
        return _Loop(self)

    async def __anext__(self) -> Event:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.leave()

    def close(self) -> None:
        """End the stream; the server aborts the request. In the loop's own thread; a stream that has ended is left as it is."""
        self._closing.set()
        if self._call is not None and not self._ended:
            self._call.cancel()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def leave(self) -> None:
        """`close` in whatever thread: objects are collected in any, and a call is cancelled in its loop's."""
        if self._loop is None or self._ended:
            return
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside:
            self.close()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its channels with it
                self._loop.call_soon_threadsafe(self.close)

    async def _next(self) -> Event | None:
        """None at the end."""
        if self._ended:
            return None
        if self._closing.is_set():
            raise closed(CLOSED_EARLY)
        try:
            return await self._read()
        except BaseException:  # the task's cancellation too
            self.close()
            raise

    async def _read(self) -> Event | None:
        attempts = self._attempts = self._attempts or self._new_attempts()
        while True:
            call = self._call or self._open(attempts)
            try:
                response = await call.read()
            except grpc.aio.AioRpcError as failure:
                await self._wait_to_start_again(failure, attempts)
                continue
            except asyncio.CancelledError:
                raise_unless_the_task_is_cancelled(CLOSED_EARLY)
                raise
            if not isinstance(response, inference_pb2.ChatResponse | inference_pb2.CompleteResponse):
                self._ended = True
                return None
            self._received = True
            event = event_of(response.event)
            if event is not None:
                return event

    def _open(self, attempts: Attempts) -> _Call:
        self._loop = asyncio.get_running_loop()
        self._call = self._start(attempts.remaining())
        return self._call

    async def _wait_to_start_again(self, failure: grpc.aio.AioRpcError, attempts: Attempts) -> None:
        """Return when another attempt is due; raise what failed when there is none."""
        error = typed_failure(failure)
        wait = None if self._received else attempts.wait_after(error)
        if wait is None:
            raise error from failure
        self._call = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._closing.wait()
            raise closed(CLOSED_EARLY) from None


class _Loop(AsyncIterator[Event]):
    """One `async for` over a stream: it goes when the loop is left, also where somebody still holds the stream.

    No asynchronous generator, which would be closed by a task of its own, some time later.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncEventStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Event:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.leave()


def raise_unless_the_task_is_cancelled(message: str) -> None:
    """gRPC reports a call that was cancelled on this side as if the task were; here the two are told apart."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise closed(message) from None
