"""How an attachment ends: what breaks the contract, what the scheduler is told of it, and that nothing is left of it."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest
from trivet_chassis.rpc import create_server
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u32
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from trivet_worker.link import attachment as attachment_module
from trivet_worker.link import scheduler_link as link_module

DEADLINE_S = 20
Counts = tuple[int, int, int]


def part_of(step: worker_pb2.Step, index: int, count: int) -> worker_pb2.Step:
    part = worker_pb2.Step()
    part.CopyFrom(step)
    part.part.index, part.part.count = index, count
    return part


def numbered(number: int) -> list[worker_pb2.Step]:
    return [worker_pb2.Step(step=number)]


def unknown_handle() -> list[worker_pb2.Step]:
    known = worker_pb2.KnownRequests(handles=pack_u32([99]), num_computed_tokens=pack_i32([0]), num_scheduled_tokens=pack_i32([1]))
    return [worker_pb2.Step(step=1, known=known)]


BREACHES = {
    "an unknown handle": (unknown_handle(), "request 99, which this worker does not hold"),
    "a step left out": (numbered(2), "step 2 came where 1 was due"),
    "a step again": (numbered(1) * 2, "step 1 came where 2 was due"),
    "a part left out": ([part_of(*numbered(1), 1, 3)], "part 1 of 3 of step 1 came where part 0 was due"),
    "a part again": ([part_of(*numbered(1), 0, 3)] * 2, "part 0 of 3 of step 1 came where part 1 was due"),
    "parts of another count": ([part_of(*numbered(1), 0, 3), part_of(*numbered(1), 1, 2)], "part 1 of 2"),
    "a whole step among parts": ([part_of(*numbered(1), 0, 2), *numbered(1)], "part 0 of 1 of step 1 came where part 1 was due"),
    "the next step among parts": ([part_of(*numbered(1), 0, 2), *numbered(2)], "step 2 came where 1 was due"),
}


@pytest.mark.parametrize("name", BREACHES)
async def test_a_breach_ends_the_stream_with_its_reason_and_a_new_life_begins(party, driver, name: str) -> None:
    scheduler, link, _ = party
    steps, reason = BREACHES[name]
    stream = await scheduler.next_stream()
    await stream.next("ready")
    for step in steps:
        stream.send(step)
    assert reason in (await stream.next("lost")).reason
    stream.down.put_nowait(None)
    again = await scheduler.next_stream()
    await again.next("ready")
    assert link.is_attached
    driver.number = 0
    again.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
    assert (await again.next("result")).status == worker_pb2.STEP_STATUS_DONE


async def test_a_scheduler_that_does_not_hear_of_the_breach_is_left_all_the_same(party, monkeypatch) -> None:
    monkeypatch.setattr(attachment_module, "GOODBYE_S", 0.05)
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    for step in unknown_handle():
        stream.send(step)
    again = await scheduler.next_stream()
    await again.next("ready")


async def test_steps_behind_one_that_could_not_be_applied_do_not_run(party, driver, monkeypatch) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    ran: list[int] = []
    execute = driver.runner.execute
    monkeypatch.setattr(driver.runner, "execute", lambda step, has_news: (ran.append(step.step), execute(step, has_news))[1])
    for step in (*unknown_handle(), *numbered(2)):
        stream.send(step)
    await stream.next("lost")
    stream.down.put_nowait(None)
    await (await scheduler.next_stream()).next("ready")
    assert ran == [1]


async def test_a_second_configuration_ends_the_stream(party) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    stream.down.put_nowait(worker_pb2.AttachResponse(configure=worker_pb2.Configure(epoch=stream.epoch)))
    assert "second configuration" in (await stream.next("lost")).reason


async def test_want_of_memory_for_the_cache_is_said_and_tried_again(party, driver, monkeypatch) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    configure = driver.runner.configure

    def fail_once(config: types_pb2.KvCacheConfig) -> None:
        monkeypatch.setattr(driver.runner, "configure", configure)
        raise MemoryError

    monkeypatch.setattr(driver.runner, "configure", fail_once)
    stream.down.put_nowait(None)
    assert "kv_cache_memory" in (await (await scheduler.next_stream()).next("lost")).reason
    await (await scheduler.next_stream()).next("ready")


async def test_a_draining_home_is_finished_for_and_left(party, driver) -> None:
    scheduler, link, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    stream.down.put_nowait(worker_pb2.AttachResponse(drain=worker_pb2.Drain(deadline_ms=1000, reason="an upgrade")))
    stream.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
    assert (await stream.next("result")).status == worker_pb2.STEP_STATUS_DONE
    assert link.is_attached


# ---- nothing is left ----

ROUNDS = 25


async def settled(counts: Callable[[], Counts]) -> Counts:
    """The counts once they have stood still for some turns of the loop."""
    last, same = counts(), 0
    async with asyncio.timeout(DEADLINE_S):
        while same < 10:
            await asyncio.sleep(0.01)
            now = counts()
            last, same = now, same + 1 if now == last else 0
    return last


def open_things() -> Counts:
    """Tasks, threads, open files."""
    return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FIRST_BACKOFF_S", 0.002)
    monkeypatch.setattr(link_module, "LONGEST_BACKOFF_S", 0.01)
    monkeypatch.setattr(attachment_module, "GOODBYE_S", 0.05)


@pytest.mark.usefixtures("soon")
async def test_a_hundred_attachments_leave_nothing_behind(driver, tools, tmp_path, llama_folder) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with tools.attached(driver, tmp_path / "s.sock", llama_folder) as (scheduler, _, task):

        async def attached():
            stream = await scheduler.next_stream()
            await stream.next("ready")
            return stream

        stream = await attached()
        stream.down.put_nowait(None)  # the first one also brings up what stays: the bundle, gRPC's own threads
        stream = await attached()
        before = await settled(open_things)
        for _ in range(ROUNDS):  # the scheduler ends the stream
            stream.down.put_nowait(None)
            stream = await attached()
        for _ in range(ROUNDS):  # a step that can't be applied
            for step in unknown_handle():
                stream.send(step)
            await stream.next("lost")
            stream.down.put_nowait(None)
            stream = await attached()
        scheduler.refusal = TrivetError(ErrorKind.UNAVAILABLE, "not now")
        refused = scheduler.refusals
        stream.down.put_nowait(None)
        async with asyncio.timeout(DEADLINE_S):
            while scheduler.refusals < refused + ROUNDS:
                await asyncio.sleep(0.01)
        scheduler.refusal = None
        stream = await attached()
        assert await settled(open_things) == before
        assert not task.done()

        for _ in range(ROUNDS):  # the scheduler is gone without a word, and back
            await scheduler.server.stop(0)
            scheduler.server = await create_server(
                address, register=lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(scheduler, server), services=()
            )
            await scheduler.server.start()
            stream = await attached()
        after = await settled(open_things)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (after, before)
