"""Sends a run's requests: a closed loop keeps so many in flight, an open one sends each when it is due. Returns what came of them."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trivet.bench.load.exchange import Exchange, Target, exchange


@dataclass(frozen=True, slots=True)
class Drive:
    """A finished run, its answers still unread."""

    exchanges: Sequence[Exchange]
    seconds: float
    core_share: float  # of one core, by this process


async def closed_loop(target: Target, bodies: Sequence[bytes], concurrency: int, timeout_s: float, on_end: Callable[[], None]) -> Drive:
    waiting, done = iter(bodies), []

    async def one_after_the_other() -> None:
        for body in waiting:
            done.append(await exchange(target, body, timeout_s))
            on_end()

    with _quiet_interpreter():
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Drive(done, seconds, cpu / seconds)


async def open_loop(target: Target, bodies: Sequence[bytes], due: Sequence[float], timeout_s: float, on_end: Callable[[], None]) -> Drive:
    """A request's clock starts when it is due, so that a server that holds everything up cannot hide it."""

    async def one(body: bytes, at: float) -> Exchange:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        result = await exchange(target, body, timeout_s, began=at)
        on_end()
        return result

    with _quiet_interpreter():
        started, cpu = time.perf_counter(), time.process_time()
        done = await asyncio.gather(*(one(body, started + at) for body, at in zip(bodies, due, strict=True)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Drive(done, seconds, cpu / seconds)


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """No collection while a server is measured: it would stop the clock's readers."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
