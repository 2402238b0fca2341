"""What a worker tells of itself through its life: loading, attached, computing, draining."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from trivet_chassis.lifecycle import Lifecycle
from trivet_chassis.rpc import LIVE, READY, is_serving
from trivet_proto.v1 import worker_pb2
from trivet_worker import server as server_module
from trivet_worker.server import serve

DEADLINE_S = 20


@dataclass
class Worker:
    """A worker's service in this process, and its addresses."""

    folder: Path
    task: asyncio.Task[None]
    lifecycle: Lifecycle
    loading: threading.Event = field(default_factory=threading.Event)

    async def get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_unix_connection(self.folder / "metrics.sock")
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body

    async def says(self, name: str) -> bool:
        return await is_serving(f"unix:{self.folder}/worker.sock", service=name)

    async def until(self, path: str, wanted: Callable[[int, str], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted(*await self.get(path)):
                await asyncio.sleep(0.02)


@pytest.fixture
def serving(driver, tools, tmp_path, llama_folder, monkeypatch):
    """Starts the service over a model that is loaded already, once it is let."""

    @asynccontextmanager
    async def start(**changes: object) -> AsyncIterator[Worker]:
        addresses = {"listen": f"unix:{tmp_path}/worker.sock", "metrics_listen": f"unix:{tmp_path}/metrics.sock"}
        settings = tools.settings_for(llama_folder, scheduler=(f"unix:{tmp_path}/s.sock",), **addresses, **changes)
        lifecycle, loading = Lifecycle(), threading.Event()

        def load(_: object):
            assert loading.wait(DEADLINE_S)
            return driver.loaded

        monkeypatch.setattr(server_module, "load_model", load)
        worker = Worker(tmp_path, asyncio.create_task(serve(settings, lifecycle)), lifecycle, loading)
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / "metrics.sock").exists():
                await asyncio.sleep(0.01)
        try:
            yield worker
        finally:
            loading.set()
            lifecycle.draining.set()
            await asyncio.wait_for(worker.task, DEADLINE_S)
            await lifecycle.cancel_tasks()

    return start


async def test_a_worker_that_loads_is_live_and_not_ready(serving) -> None:
    async with serving() as worker:
        assert await worker.says(LIVE)
        assert not await worker.says(READY)
        assert (await worker.get("/health/live"))[0] == 200
        assert (await worker.get("/health/ready"))[0] == 503
        assert (await worker.get("/health/progress"))[1] == '{"busy": false, "last_step_age_ms": null}'


async def test_a_worker_told_to_leave_while_it_loads_leaves(serving) -> None:
    async with serving() as worker:
        worker.lifecycle.draining.set()
        await asyncio.wait_for(asyncio.shield(worker.task), DEADLINE_S)
        assert not worker.loading.is_set()


async def test_a_worker_is_ready_while_it_is_attached(serving, party) -> None:
    scheduler, _, own = party
    await (await scheduler.next_stream()).next("ready")
    own.cancel()  # the party's own worker; this test brings one
    async with serving(drain_timeout=0.0) as worker:
        worker.loading.set()
        stream = await scheduler.next_stream()
        await stream.next("ready")
        await worker.until("/health/ready", lambda status, _: status == 200)
        async with asyncio.timeout(DEADLINE_S):
            while not await worker.says(READY):
                await asyncio.sleep(0.02)
        _, page = await worker.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(lines["trivet_streams"]) == 1
        assert float(lines["trivet_worker_attached"]) == 1
        assert float(lines["trivet_worker_kv_cache_bytes"]) > 0
        assert float(lines["trivet_worker_memory_available_bytes"]) > 0
        assert {"trivet_tasks", "process_open_fds"} <= lines.keys()


async def test_progress_is_the_age_of_the_step_that_computes(serving, party, driver, monkeypatch) -> None:
    scheduler, _, own = party
    await (await scheduler.next_stream()).next("ready")
    own.cancel()
    release, execute = threading.Event(), driver.runner.execute

    def slow(step: worker_pb2.Step, has_news: Callable[[], bool]) -> worker_pb2.StepResult:
        assert release.wait(DEADLINE_S)
        return execute(step, has_news)

    monkeypatch.setattr(driver.runner, "execute", slow)
    async with serving(drain_timeout=0.0, step_limit=0.05) as worker:
        worker.loading.set()
        stream = await scheduler.next_stream()
        await stream.next("ready")
        stream.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
        await worker.until("/health/progress", lambda status, body: status == 503 and json.loads(body)["busy"])
        assert (await worker.get("/health/live"))[0] == 200
        release.set()
        await worker.until("/health/progress", lambda status, body: status == 200 and not json.loads(body)["busy"])


async def test_what_runs_when_a_worker_drains_is_finished_until_the_scheduler_lets_go(serving, party, driver) -> None:
    scheduler, _, own = party
    await (await scheduler.next_stream()).next("ready")
    own.cancel()
    async with serving(drain_timeout=DEADLINE_S) as worker:
        worker.loading.set()
        stream = await scheduler.next_stream()
        await stream.next("ready")
        request = driver.request([1, 2, 3], temperature=0.0)
        stream.send(driver.message([request]))
        assert (await stream.next("result")).status == worker_pb2.STEP_STATUS_DONE
        worker.lifecycle.draining.set()
        assert (await stream.next("draining")).deadline_ms == DEADLINE_S * 1000
        for index in range(3):
            stream.send(driver.message(known=[(request.handle, 3 + index, 1)]))
            assert (await stream.next("result")).status == worker_pb2.STEP_STATUS_DONE
        assert not worker.task.done()
        stream.down.put_nowait(None)
        await asyncio.wait_for(asyncio.shield(worker.task), 5)
