"""A stream of events, synchronous: one request, read event by event.

The request is sent at the first read. Whoever leaves a `for` loop over the stream or a `with` block, or drops the stream, cancels the call,
and the server aborts the request: nothing is left to the garbage collection of gRPC's objects. One thread reads a stream; any may close it.
"""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self, cast

import grpc
from trivet_proto.call_errors import FailedCall
from trivet_proto.v1 import inference_pb2

from trivet_client.errors import closed, typed_failure
from trivet_client.events import Event, event_of
from trivet_client.retrying import Attempts

CLOSED_EARLY = "the stream was closed before its last event"


class Response(Protocol):
    """A message of a stream of the contract."""

    @property
    def event(self) -> inference_pb2.GenerationEvent: ...


class _Call(Protocol):
    def __next__(self) -> Response: ...

    def cancel(self) -> bool: ...


class EventStream(Iterator[Event]):
    """Events of one request, the first of them `Started`.

    A `for` loop that is left early ends the stream; to read on after some events, use `next()`. Reading raises the typed errors of
    `trivet_client.errors`; reading on after an early close raises `CancelledCallError`.
    """

    def __init__(self, start: Callable[[float | None], _Call], attempts: Callable[[], Attempts]) -> None:
        self._start = start
        self._new_attempts = attempts
        self._attempts: Attempts | None = None
        self._call: _Call | None = None
        self._received = False
        self._ended = False
        self._closing = threading.Event()

    def __iter__(self) -> Iterator[Event]:
        # A generator of the loop's own: it goes when the loop is left, also where somebody still holds the stream.
        with self:
            while (event := self._next()) is not None:
                yield event

    def __next__(self) -> Event:
        event = self._next()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the stream; the server aborts the request. From any thread; a stream that has ended is left as it is."""
        self._closing.set()
        if self._call is not None and not self._ended:
            self._call.cancel()

    def _next(self) -> Event | None:
        """None at the end."""
        if self._ended:
            return None
        if self._closing.is_set():
            raise closed(CLOSED_EARLY)
        try:
            return self._read()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def _read(self) -> Event | None:
        attempts = self._attempts = self._attempts or self._new_attempts()
        while True:
            call = self._call or self._open(attempts)
            try:
                response = next(call, None)
            except grpc.RpcError as failure:
                self._wait_to_start_again(failure, attempts)
                continue
            if response is None:
                self._ended = True
                return None
            self._received = True
            event = event_of(response.event)
            if event is not None:
                return event

    def _open(self, attempts: Attempts) -> _Call:
        call = self._call = self._start(attempts.remaining())
        if self._closing.is_set():
            call.cancel()  # `close` may have looked before there was a call
        return call

    def _wait_to_start_again(self, failure: grpc.RpcError, attempts: Attempts) -> None:
        """Return when another attempt is due; raise what failed when there is none."""
        if self._closing.is_set():
            raise closed(CLOSED_EARLY) from None
        error = typed_failure(cast(FailedCall, failure))
        wait = None if self._received else attempts.wait_after(error)
        if wait is None:
            raise error from failure
        self._call = None
        if self._closing.wait(wait):
            raise closed(CLOSED_EARLY) from None
