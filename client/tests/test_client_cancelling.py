"""However a stream is left early, the call is cancelled and the server aborts the request."""

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest
from trivet_client import AsyncClient, AsyncEventStream, CancelledCallError, Client, EventStream, RetryPolicy, SamplingParams, Started
from trivet_client.retrying import Attempts
from trivet_proto.v1 import inference_pb2

ENDLESS = SamplingParams(max_tokens=64)


class LeaveError(Exception):
    """Raised within a loop."""


@pytest.fixture(autouse=True)
def paused(backend) -> None:
    """Requests give one token and wait."""
    backend.do(lambda: setattr(backend.scheduler, "pause_after", 1))


def until_aborted(backend, count: int = 1) -> None:
    backend.until(lambda: len(backend.scheduler.aborted) == count)
    backend.until_idle()


# ---- synchronous ----


def break_out(client: Client, stream: EventStream) -> None:
    for event in stream:
        assert isinstance(event, Started)
        break


def break_out_unnamed(client: Client, stream: EventStream) -> None:
    del stream
    for _ in client.stream_complete("Hello", ENDLESS):
        break


def raise_within(client: Client, stream: EventStream) -> None:
    with contextlib.suppress(LeaveError):
        for _ in stream:
            raise LeaveError


def return_within(client: Client, stream: EventStream) -> None:
    for _ in stream:
        return


def close_it(client: Client, stream: EventStream) -> None:
    next(stream)
    stream.close()


def leave_the_block(client: Client, stream: EventStream) -> None:
    with stream:
        next(stream)


def close_the_client(client: Client, stream: EventStream) -> None:
    next(stream)
    client.close()


@pytest.mark.parametrize(
    "leave",
    [break_out, break_out_unnamed, raise_within, return_within, close_it, leave_the_block, close_the_client],
    ids=lambda f: f.__name__,
)
def test_leaving_a_stream_aborts_its_request(backend, leave: Callable[[Client, EventStream], None]) -> None:
    with Client(backend.address) as client:
        stream = client.stream_chat("Hello", ENDLESS)  # held to the end: nothing here is garbage
        leave(client, stream)
        until_aborted(backend)


def test_dropping_a_stream_aborts_its_request(backend, client: Client) -> None:
    stream = client.stream_chat("Hello", ENDLESS)
    next(stream)
    del stream
    until_aborted(backend)


def test_a_stream_in_a_cycle_is_cancelled_when_it_is_collected(backend, client: Client) -> None:
    cycle: list[object] = [client.stream_chat("Hello", ENDLESS)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    until_aborted(backend)


def test_another_thread_may_close_a_stream_that_is_being_read(backend, client: Client) -> None:
    stream = client.stream_chat("Hello", ENDLESS)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            for _ in stream:
                pass
        except CancelledCallError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    backend.until(lambda: len(backend.scheduler.live) == 1)
    stream.close()
    reader.join(5)
    assert [str(error) for error in caught] == ["the stream was closed before its last event"]
    until_aborted(backend)


def test_closing_a_client_ends_a_whole_answer_that_another_thread_waits_for(backend, client: Client) -> None:
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.chat("Hello", ENDLESS)
        except CancelledCallError as error:
            caught.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    backend.until(lambda: len(backend.scheduler.live) == 1)
    client.close()
    asker.join(5)
    assert len(caught) == 1
    until_aborted(backend)


def test_a_stream_that_nobody_reads_asks_for_nothing(backend, client: Client) -> None:
    with client.stream_chat("Hello", ENDLESS) as stream:
        assert client.models()
    with pytest.raises(CancelledCallError, match="closed before its last event"):
        next(stream)
    assert backend.scheduler.adds == []


def test_reading_on_after_an_early_end_is_an_error_and_after_the_last_event_is_not(backend, client: Client) -> None:
    stream = client.stream_chat("Hello", ENDLESS)
    break_out(client, stream)
    for read_on in (lambda: next(stream), lambda: list(stream)):
        with pytest.raises(CancelledCallError, match="closed before its last event"):
            read_on()
    until_aborted(backend)
    backend.do(lambda: setattr(backend.scheduler, "pause_after", None))
    whole = client.stream_chat("Hello", SamplingParams(max_tokens=2))
    assert list(whole)
    assert list(whole) == []
    whole.close()
    assert len(backend.scheduler.aborted) == 1, "what has finished is not aborted"


INTERRUPTED = """
import signal
import sys
from trivet_client import Client
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell has it ignored
try:
    for event in Client(sys.argv[1]).stream_chat("Hello"):
        print(type(event).__name__, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_ends_a_wait_and_its_request(backend) -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, backend.address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "Started\n"
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=10)
    assert printed.endswith("interrupted\n")
    assert process.returncode == 0
    until_aborted(backend)


# ---- asynchronous ----


async def break_out_of_it(client: AsyncClient, stream: AsyncEventStream) -> None:
    async for event in stream:
        assert isinstance(event, Started)
        break


async def raise_within_it(client: AsyncClient, stream: AsyncEventStream) -> None:
    with contextlib.suppress(LeaveError):
        async for _ in stream:
            raise LeaveError


async def close_it_now(client: AsyncClient, stream: AsyncEventStream) -> None:
    await anext(stream)
    stream.close()


async def close_it_by_the_block(client: AsyncClient, stream: AsyncEventStream) -> None:
    async with contextlib.aclosing(stream):
        await anext(stream)


async def leave_its_block(client: AsyncClient, stream: AsyncEventStream) -> None:
    async with stream:
        await anext(stream)


async def close_its_client(client: AsyncClient, stream: AsyncEventStream) -> None:
    await anext(stream)
    await client.close()


@pytest.mark.parametrize(
    "leave",
    [
        break_out_of_it,
        raise_within_it,
        close_it_now,
        close_it_by_the_block,
        leave_its_block,
        close_its_client,
    ],
    ids=lambda f: f.__name__,
)
async def test_leaving_an_asynchronous_stream_aborts_its_request(
    backend, leave: Callable[[AsyncClient, AsyncEventStream], Awaitable[None]]
) -> None:
    async with AsyncClient(backend.address) as client:
        stream = client.stream_chat("Hello", ENDLESS)
        await leave(client, stream)
        await asyncio.to_thread(until_aborted, backend)


async def read_on(client: AsyncClient) -> None:
    async for _ in client.stream_chat("Hello", ENDLESS):
        pass


async def dwell_on_an_event(client: AsyncClient) -> None:
    async for _ in client.stream_chat("Hello", ENDLESS):
        await asyncio.Event().wait()


async def wait_for_all(client: AsyncClient) -> None:
    await client.chat("Hello", ENDLESS)


@pytest.mark.parametrize("read", [read_on, dwell_on_an_event, wait_for_all], ids=lambda f: f.__name__)
async def test_cancelling_a_task_aborts_its_request(
    backend, async_client: AsyncClient, read: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    reader = asyncio.create_task(read(async_client))
    await asyncio.to_thread(backend.until, lambda: len(backend.scheduler.live) == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.to_thread(until_aborted, backend)


async def test_dropping_an_asynchronous_stream_aborts_its_request(backend, async_client: AsyncClient) -> None:
    stream = async_client.stream_chat("Hello", ENDLESS)
    await anext(stream)
    del stream
    await asyncio.to_thread(until_aborted, backend)


async def test_an_asynchronous_stream_may_be_collected_in_another_thread(backend, async_client: AsyncClient) -> None:
    streams = [async_client.stream_chat("Hello", ENDLESS)]
    await anext(streams[0])
    await asyncio.to_thread(streams.clear)
    await asyncio.to_thread(until_aborted, backend)


async def test_a_stream_closed_by_another_task_ends_its_reader(backend, async_client: AsyncClient) -> None:
    stream = async_client.stream_chat("Hello", ENDLESS)

    async def read() -> None:
        async for _ in stream:
            pass

    reader = asyncio.create_task(read())
    await asyncio.to_thread(backend.until, lambda: len(backend.scheduler.live) == 1)
    stream.close()
    with pytest.raises(CancelledCallError, match="closed before its last event"):
        await reader
    await asyncio.to_thread(until_aborted, backend)
    with pytest.raises(CancelledCallError):
        await anext(stream)


async def test_closing_a_client_ends_its_readers(backend, async_client: AsyncClient) -> None:
    asking = [asyncio.create_task(async_client.chat("Hello", ENDLESS)) for _ in range(3)]
    await asyncio.to_thread(backend.until, lambda: len(backend.scheduler.live) == 3)
    await async_client.close()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in ended] == [CancelledCallError] * 3
    await asyncio.to_thread(until_aborted, backend, 3)


def test_a_loop_that_ends_with_a_stream_open_ends_its_request(backend) -> None:
    held: list[object] = []

    async def leave_open() -> None:
        client = AsyncClient(backend.address)
        stream = client.stream_chat("Hello", ENDLESS)
        await anext(stream)
        held.extend((client, stream))

    asyncio.run(leave_open())
    held.clear()
    gc.collect()
    until_aborted(backend)


# ---- not by the garbage collection of gRPC's objects ----


class Held:
    """A call that somebody holds, so that it is cancelled by name or not at all."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def __next__(self) -> inference_pb2.ChatResponse:
        return inference_pb2.ChatResponse(event=inference_pb2.GenerationEvent(started=inference_pb2.Started()))

    async def read(self) -> inference_pb2.ChatResponse:
        return next(self)


def test_a_dropped_stream_cancels_its_call_by_name() -> None:
    call = Held()
    stream = EventStream(lambda remaining: call, lambda: Attempts(RetryPolicy(), None))
    next(stream)
    assert not call.cancelled
    del stream
    assert call.cancelled


async def test_a_dropped_asynchronous_stream_cancels_its_call_by_name() -> None:
    call = Held()
    stream = AsyncEventStream(lambda remaining: call, lambda: Attempts(RetryPolicy(), None))
    await anext(stream)
    assert not call.cancelled
    del stream
    assert call.cancelled
