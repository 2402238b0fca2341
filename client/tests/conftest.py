"""A real frontend before a fake scheduler, both in a thread with a loop of its own: the synchronous client would block theirs.

Tests steer the scheduler and look at it through `Backend.do`, which runs in that loop.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from trivet_checkpoint import bundle_of, open_checkpoint, resolve_model
from trivet_client import AsyncClient, AsyncEventStream, Client, Event, EventStream
from trivet_frontend.config import FrontendSettings
from trivet_frontend.server import Frontend

from frontend.tests.conftest import FakeScheduler, forced_or_counting, running_frontend, serving

T = TypeVar("T")

WITHIN_S = 5.0


class Background:
    """A loop in a thread of its own, and what runs in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="backend", daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Backend:
    """Scheduler and frontend under test."""

    def __init__(self, background: Background, scheduler: FakeScheduler, frontend: Frontend) -> None:
        self._background = background
        self.scheduler = scheduler
        self.frontend = frontend
        self.address = frontend.grpc_address

    def do(self, look: Callable[[], T]) -> T:
        """What `look` returns in the backend's loop."""

        async def looking() -> T:
            return look()

        return self._background.run(looking())

    def until(self, condition: Callable[[], bool], *, within: float = WITHIN_S) -> None:
        """Return when `condition`, asked in the backend's loop, holds."""

        async def asking() -> None:
            async with asyncio.timeout(within):
                while not condition():
                    await asyncio.sleep(0.01)

        self._background.run(asking())

    def until_idle(self, *, tasks: int | None = None) -> None:
        """Return when no request is left, at frontend or scheduler, nor a task more than `tasks`."""

        def idle() -> bool:
            few = tasks is None or len(asyncio.all_tasks()) - 1 <= tasks  # the one that asks is not counted
            return not self.scheduler.live and self.frontend.inference.requests_inside == 0 and few

        self.until(idle)

    def tasks(self) -> int:
        return self.do(lambda: len(asyncio.all_tasks())) - 1


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.end()


@pytest.fixture(scope="session")
def bundle() -> tuple[bytes, bytes]:
    """The default model's bundle and its digest."""
    made = bundle_of(open_checkpoint(resolve_model(None)))
    return made.to_bytes(), made.digest


@contextlib.asynccontextmanager
async def serving_both(folder: Path, bundle: tuple[bytes, bytes], **settings: object) -> AsyncIterator[tuple[FakeScheduler, Frontend]]:
    scheduler = FakeScheduler(address=f"unix:{folder}/scheduler.sock", bundle=bundle[0], digest=bundle[1])
    scheduler.flowing.set()
    fixed = {"scheduler": (scheduler.address,), "port": 0, "grpc_listen": f"unix:{folder}/frontend.sock"}
    async with serving(scheduler), running_frontend(FrontendSettings(**(fixed | settings))) as frontend:
        yield scheduler, frontend


Start = Callable[..., contextlib.AbstractContextManager[Backend]]


@pytest.fixture(scope="session")
def start_backend(background: Background, bundle: tuple[bytes, bytes]) -> Start:
    """Starts scheduler and frontend with the settings that a test gives."""

    @contextlib.contextmanager
    def start(folder: Path | None = None, **settings: object) -> Iterator[Backend]:
        # A socket's path has room for about 100 characters, which pytest's folders exceed.
        with tempfile.TemporaryDirectory(prefix="trivet-") as name:
            running = serving_both(folder or Path(name), bundle, **settings)
            scheduler, frontend = background.run(running.__aenter__())
            try:
                yield Backend(background, scheduler, frontend)
            finally:
                background.run(running.__aexit__(None, None, None))

    return start


@pytest.fixture(scope="session")
def one_backend(start_backend: Start) -> Iterator[Backend]:
    with start_backend() as backend:
        yield backend


@pytest.fixture
def backend(one_backend: Backend) -> Iterator[Backend]:
    """The session's backend, as new: no faults asked for, nothing recorded."""

    def renew() -> None:
        scheduler = one_backend.scheduler
        scheduler.script, scheduler.tokens_per_step = forced_or_counting, 1
        scheduler.refusal = scheduler.fail_after = scheduler.pause_after = None
        for record in (scheduler.adds, scheduler.aborted, scheduler.abort_reasons, scheduler.stopped):
            record.clear()

    one_backend.do(renew)
    yield one_backend
    one_backend.until_idle()


@pytest.fixture
def client(backend: Backend) -> Iterator[Client]:
    with Client(backend.address, timeout=30) as client:
        yield client


@pytest.fixture
async def async_client(backend: Backend) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(backend.address, timeout=30) as client:
        yield client


class SyncSide:
    """`Client` behind awaitable calls, so that one suite tests both clients."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, name), *arguments, **named)

    async def read(self, stream: EventStream, count: int = 1_000_000) -> list[Event]:
        """At most `count` events, one by one, the stream left open."""

        def reading() -> list[Event]:
            events: list[Event] = []
            while len(events) < count and (event := next(stream, None)) is not None:
                events.append(event)
            return events

        return await asyncio.to_thread(reading)

    async def close(self) -> None:
        self.client.close()


class AsyncSide:
    """`AsyncClient`, as `SyncSide`."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return await getattr(self.client, name)(*arguments, **named)

    async def read(self, stream: AsyncEventStream, count: int = 1_000_000) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(StopAsyncIteration):
            while len(events) < count:
                events.append(await anext(stream))
        return events

    async def close(self) -> None:
        await self.client.close()


Side = SyncSide | AsyncSide
Connect = Callable[..., Side]


@pytest.fixture(params=["sync", "async"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes clients of one of both kinds."""
    sides: list[Side] = []

    def make(address: str, **settings: Any) -> Side:
        settings = {"timeout": 30} | settings
        side = SyncSide(Client(address, **settings)) if request.param == "sync" else AsyncSide(AsyncClient(address, **settings))
        sides.append(side)
        return side

    yield make
    for side in sides:
        await side.close()


@pytest.fixture
def side(backend: Backend, connect: Connect) -> Side:
    return connect(backend.address)
