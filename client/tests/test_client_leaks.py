"""Two hundred streams left early in each of four ways: nothing of them stays at the client, the frontend or the scheduler."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from trivet_client import AsyncClient, Client, DeadlineExceededError, SamplingParams, Started, collect_async

COUNT = 200
ROUND = 100
ENDLESS = SamplingParams(max_tokens=64)
MOST_GROWTH = 20 * 1024 * 1024
GONE_WITHIN = 3.0


@pytest.fixture(autouse=True)
def paused(backend) -> None:
    """Requests give one token and wait."""
    backend.do(lambda: setattr(backend.scheduler, "pause_after", 1))


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def until_nothing_is_left(backend, tasks: int) -> None:
    """The scheduler heard of the end of each that it had; no handler, request or child of it is left."""
    backend.until(lambda: len(backend.scheduler.aborted) == len(backend.scheduler.adds), within=GONE_WITHIN)
    backend.until_idle(tasks=tasks)


def serves_again(backend, client: Client) -> None:
    backend.do(lambda: setattr(backend.scheduler, "pause_after", None))
    assert client.chat("Hello", SamplingParams(max_tokens=2)).usage.completion_tokens == 2


def cancel_after_one_event(client: Client) -> None:
    for event in client.stream_chat("Hello", ENDLESS):
        assert isinstance(event, Started)
        break


def drop_the_stream(client: Client) -> None:
    next(client.stream_chat("Hello", ENDLESS))


def let_the_deadline_pass(client: Client) -> None:
    with pytest.raises(DeadlineExceededError):
        list(client.stream_chat("Hello", ENDLESS, timeout=0.3))


def leave_many(leave: Callable[[Client], None], client: Client, count: int) -> None:
    with ThreadPoolExecutor(ROUND) as pool:
        for _ in pool.map(leave, [client] * count):
            pass


@pytest.mark.parametrize("leave", [cancel_after_one_event, drop_the_stream, let_the_deadline_pass], ids=lambda f: f.__name__)
def test_nothing_stays_of_streams_left_by_threads(backend, client: Client, leave) -> None:
    leave_many(leave, client, ROUND)  # so that pools and buffers have their size
    backend.until_idle()
    tasks, threads, before = backend.tasks(), threading.active_count(), memory()
    leave_many(leave, client, COUNT)
    until_nothing_is_left(backend, tasks)
    assert memory() - before < MOST_GROWTH
    backend.until(lambda: threading.active_count() <= threads, within=GONE_WITHIN)
    # On a busy machine a deadline may pass before a request gets so far.
    assert leave is let_the_deadline_pass or len(backend.scheduler.adds) == ROUND + COUNT
    serves_again(backend, client)


async def cancel_after_one_event_async(client: AsyncClient) -> None:
    async for event in client.stream_chat("Hello", ENDLESS):
        assert isinstance(event, Started)
        break


async def drop_the_stream_async(client: AsyncClient) -> None:
    await anext(client.stream_chat("Hello", ENDLESS))


async def let_the_deadline_pass_async(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceededError):
        await collect_async(client.stream_chat("Hello", ENDLESS, timeout=0.3))


async def cancel_the_task_async(client: AsyncClient) -> None:
    stream = client.stream_chat("Hello", ENDLESS)
    await anext(stream)
    reading = asyncio.create_task(collect_async(stream))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()


@pytest.mark.parametrize(
    "leave",
    [cancel_after_one_event_async, drop_the_stream_async, let_the_deadline_pass_async, cancel_the_task_async],
    ids=lambda f: f.__name__,
)
async def test_nothing_stays_of_streams_left_by_tasks(backend, async_client: AsyncClient, leave) -> None:
    await asyncio.gather(*(leave(async_client) for _ in range(ROUND)))
    await asyncio.to_thread(backend.until_idle)
    tasks, own_tasks, before = backend.tasks(), len(asyncio.all_tasks()), memory()
    for _ in range(COUNT // ROUND):
        await asyncio.gather(*(leave(async_client) for _ in range(ROUND)))
    await asyncio.to_thread(until_nothing_is_left, backend, tasks)
    assert leave is let_the_deadline_pass_async or len(backend.scheduler.adds) == ROUND + COUNT
    assert memory() - before < MOST_GROWTH
    async with asyncio.timeout(GONE_WITHIN):
        while len(asyncio.all_tasks()) > own_tasks:
            await asyncio.sleep(0.01)
    with Client(backend.address) as client:
        await asyncio.to_thread(serves_again, backend, client)


DOOMED = """
import asyncio, sys
from trivet_client import AsyncClient

async def hold(client, opened):
    async for event in client.stream_chat("Hello"):
        opened.release()

async def main(address, count):
    client, opened = AsyncClient(address), asyncio.Semaphore(0)
    held = [asyncio.create_task(hold(client, opened)) for _ in range(count)]
    for _ in held:
        await opened.acquire()
    print("open", flush=True)
    await asyncio.gather(*held)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_nothing_stays_of_the_streams_of_a_client_that_is_killed(backend, client: Client) -> None:
    client.models()
    tasks = backend.tasks()
    process = subprocess.Popen([sys.executable, "-c", DOOMED, backend.address, str(COUNT)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        backend.until(lambda: len(backend.scheduler.live) == COUNT)
    finally:
        process.kill()
        process.communicate()
    until_nothing_is_left(backend, tasks)
    serves_again(backend, client)
