"""A blocking call in a thread of its own, awaited. Owns nothing; each call has its thread and no more.

Asyncio's default pool is for short work: it has few threads where there are few cores, and a wait as long as a child's life keeps one
from all others. These threads are daemons, so that none of them holds up the end of the process.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], *, name: str) -> T:
    """What `work` returns or raises. Cancelling ends the waiting, not the work."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver(result: T) -> None:
        if not outcome.done():
            outcome.set_result(result)

    def deliver_failure(error: BaseException) -> None:
        if not outcome.done():
            outcome.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(deliver_failure, error)
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
