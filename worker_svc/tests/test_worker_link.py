"""The worker's end of the stream against a scheduler in this process, over a Unix socket."""

import asyncio
import hashlib
import threading

import numpy as np
import pytest
from trivet_chassis.lifecycle import Lifecycle
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u32, unpack_i32
from trivet_proto.v1 import types_pb2, worker_pb2
from trivet_worker.link import attachment as attachment_module
from trivet_worker.link.results import split_result
from trivet_worker.server import serve

DEADLINE_S = 20


async def test_a_worker_says_what_it_is_brings_its_bundle_and_is_ready(party, driver) -> None:
    scheduler, link, _ = party
    stream = await scheduler.next_stream()
    ready = await stream.next("ready")
    assert (ready.epoch, ready.num_blocks) == (stream.epoch, 64)
    hello = stream.hello
    assert hello.hello.name == "replica-a"
    assert len(hello.hello.instance) == 16
    assert hello.card.fingerprint.dtype == "float32"
    assert len(hello.card.fingerprint.weights) == 32
    assert (hello.limits.block_size, hello.limits.max_num_seqs, hello.limits.max_num_batched_tokens) == (4, 8, 256)
    assert hello.abilities.steps_in_flight == 2
    assert [layer.layer for layer in hello.ranks[0].layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert hello.ranks[0].num_kv_blocks == 64
    assert hashlib.sha256(scheduler.bundle).digest() == hello.card.bundle_sha256 == driver.loaded.bundle.digest
    assert link.is_attached


async def test_steps_are_answered_in_order_with_two_in_flight(party, driver) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    request = driver.request(list(range(20)), temperature=0.0)
    stream.send(driver.message([request]))
    stream.send(driver.message(known=[(request.handle, 20, 1)]))
    results = [await stream.next("result") for _ in range(2)]
    assert [result.step for result in results] == [1, 2]
    assert all(result.status == worker_pb2.STEP_STATUS_DONE and result.epoch == stream.epoch for result in results)
    assert all(len(unpack_i32(result.token_ids)) == 1 for result in results)


async def test_a_step_in_parts_is_run_once_whole(party, driver) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    requests = [driver.request([3, 4, 5], temperature=0.0, room=8) for _ in range(2)]
    step = driver.message()
    for index, request in enumerate(requests):
        stream.send(worker_pb2.Step(step=step.step, new_requests=[request], part=types_pb2.Part(index=index, count=2)))
    result = await stream.next("result")
    assert len(unpack_i32(result.token_ids)) == 2


async def test_heartbeats_go_on_while_a_step_computes(party, driver, monkeypatch) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    release, execute = threading.Event(), driver.runner.execute

    def slow(step, has_news):
        release.wait(DEADLINE_S)
        return execute(step, has_news)

    monkeypatch.setattr(driver.runner, "execute", slow)
    stream.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
    try:
        beat = await stream.next("heartbeat")
        while not beat.HasField("running_step"):
            beat = await stream.next("heartbeat")
        assert (beat.last_step_received, beat.running_step) == (1, 1)
        assert beat.running_for_ms >= 0
    finally:
        release.set()
    assert (await stream.next("result")).status == worker_pb2.STEP_STATUS_DONE


async def test_when_the_stream_ends_the_worker_dials_again_and_starts_empty(party, driver, monkeypatch) -> None:
    scheduler, link, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    release, execute = threading.Event(), driver.runner.execute
    ran: list[int] = []

    def slow(step, has_news):
        ran.append(step.step)
        release.wait(DEADLINE_S)
        return execute(step, has_news)

    monkeypatch.setattr(driver.runner, "execute", slow)
    held = driver.request([1, 2, 3], temperature=0.0)
    stream.send(driver.message([held]))
    stream.send(driver.message(known=[(held.handle, 3, 1)]))
    while (await stream.next("heartbeat")).last_step_received != 2:
        pass
    stream.down.put_nowait(None)
    async with asyncio.timeout(DEADLINE_S):
        while link.is_attached:
            await asyncio.sleep(0.01)
    release.set()
    again = await scheduler.next_stream()
    await again.next("ready")
    assert again.epoch != stream.epoch
    assert ran == [1]  # the step behind it was discarded
    driver.number = 0
    step = driver.message([driver.request([1, 2, 3], temperature=0.0)])
    again.send(step, epoch=stream.epoch)  # of the older epoch: dropped
    again.send(step)
    assert (await again.next("result")).status == worker_pb2.STEP_STATUS_DONE
    again.send(driver.message(known=[(held.handle, 3, 1)]))  # it holds nothing of the old life
    assert f"request {held.handle}, which this worker does not hold" in (await again.next("lost")).reason


async def test_a_silent_scheduler_is_left_and_dialled_again(driver, tools, tmp_path, llama_folder, monkeypatch) -> None:
    monkeypatch.setattr(attachment_module, "SILENCE_S", 0.3)
    async with tools.attached(driver, tmp_path / "s.sock", llama_folder) as (scheduler, _, _):
        first = await scheduler.next_stream()
        second = await scheduler.next_stream()
        assert first.epoch != second.epoch


async def test_a_draining_worker_is_let_go_and_does_not_dial_again(party) -> None:
    scheduler, link, task = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    link.say_draining(12.5)
    draining = await stream.next("draining")
    assert draining.deadline_ms == 12500
    assert "shutting down" in draining.reason
    stream.down.put_nowait(None)
    await asyncio.wait_for(task, DEADLINE_S)
    assert scheduler.streams.empty()
    assert not link.is_attached


async def test_a_control_that_is_not_known_is_answered(party) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    control = worker_pb2.Control(call_id=b"c" * 16, profile=worker_pb2.ControlProfile(start=True))
    stream.down.put_nowait(worker_pb2.AttachResponse(control=control))
    reply = await stream.next("reply")
    assert reply.call_id == b"c" * 16
    assert reply.error.kind == types_pb2.ERROR_KIND_UNIMPLEMENTED


async def test_a_worker_asleep_runs_no_step_until_it_is_woken(party, driver) -> None:
    scheduler, _, _ = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    asleep = worker_pb2.Control(call_id=b"s" * 16, sleep=worker_pb2.ControlSleep(level=2))
    awake = worker_pb2.Control(call_id=b"w" * 16, wake_up=worker_pb2.ControlWakeUp())
    first = driver.message([driver.request([1, 2, 3], temperature=0.0)])
    stream.send(first)
    expected = (await stream.next("result")).token_ids
    for control in (asleep, awake):
        stream.down.put_nowait(worker_pb2.AttachResponse(control=control))
        assert not (await stream.next("reply")).HasField("error")
    stream.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
    assert (await stream.next("result")).token_ids == expected
    stream.down.put_nowait(worker_pb2.AttachResponse(control=asleep))
    stream.send(driver.message([driver.request([1, 2, 3], temperature=0.0)]))
    assert "sleeps" in (await stream.next("lost")).reason


async def test_a_worker_that_does_not_belong_there_ends_with_the_reason(driver, tools, tmp_path, llama_folder, caplog) -> None:
    async with tools.attached(driver, tmp_path / "s.sock", llama_folder) as (scheduler, _, task):
        scheduler.refusal = TrivetError(ErrorKind.FAILED_PRECONDITION, "another model is served here")
        with pytest.raises(TrivetError, match="another model is served here"):
            await asyncio.wait_for(task, DEADLINE_S)
    assert "dialling again" not in caplog.text


async def test_a_worker_whose_name_another_has_taken_does_not_dial_again(party, caplog) -> None:
    scheduler, link, task = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    taken = TrivetError(ErrorKind.ALREADY_EXISTS, "another worker has come under the name replica-a: give each worker its own --name")
    stream.down.put_nowait(worker_pb2.AttachResponse(error=taken.to_proto()))
    with pytest.raises(TrivetError, match="replica-a: give each worker its own --name") as ended:
        await asyncio.wait_for(task, DEADLINE_S)
    assert ended.value.appearance.http_status < 500, "so the exit code is that of a configuration error"
    assert "dialling again" not in caplog.text
    assert scheduler.streams.empty()
    assert not link.is_attached


async def test_a_draining_worker_whose_name_its_successor_has_taken_leaves_in_peace(party) -> None:
    scheduler, link, task = party
    stream = await scheduler.next_stream()
    await stream.next("ready")
    link.say_draining(10)
    await stream.next("draining")
    taken = TrivetError(ErrorKind.ALREADY_EXISTS, "another worker has come under the name replica-a")
    stream.down.put_nowait(worker_pb2.AttachResponse(error=taken.to_proto()))
    await asyncio.wait_for(task, DEADLINE_S)
    assert scheduler.streams.empty()


async def test_a_refusal_ends_the_service_as_a_configuration_that_cannot_work(driver, tools, tmp_path, llama_folder) -> None:
    async with tools.attached(driver, tmp_path / "s.sock", llama_folder) as (scheduler, _, task):
        scheduler.refusal = TrivetError(ErrorKind.FAILED_PRECONDITION, "another model is served here")
        await asyncio.wait({task}, timeout=DEADLINE_S)
        settings = tools.settings_for(llama_folder, scheduler=(f"unix:{tmp_path}/s.sock",), listen="", metrics_listen="")
        lifecycle = Lifecycle()
        with pytest.raises(TrivetError, match="another model is served here"):
            await asyncio.wait_for(serve(settings, lifecycle), DEADLINE_S)
        assert lifecycle.failure is None  # so the exit code is that of a configuration error
        await lifecycle.cancel_tasks()


async def test_a_service_leaves_in_time_though_the_scheduler_does_not_let_go(driver, tools, tmp_path, llama_folder) -> None:
    async with tools.attached(driver, tmp_path / "s.sock", llama_folder) as (scheduler, _, _):
        await scheduler.next_stream()
        address = (f"unix:{tmp_path}/s.sock",)
        settings = tools.settings_for(llama_folder, scheduler=address, listen="", metrics_listen="", drain_timeout=0.2)
        lifecycle = Lifecycle()
        service = asyncio.create_task(serve(settings, lifecycle))
        stream = await scheduler.next_stream()
        await stream.next("ready")
        lifecycle.draining.set()
        await stream.next("draining")
        await asyncio.wait_for(service, 5)
        await lifecycle.cancel_tasks()


def test_long_prompt_logprobs_are_cut_into_parts_under_the_limit() -> None:
    entries = 128 * 21
    logprobs = types_pb2.Logprobs(token_ids=pack_i32([1] * entries), values=pack_f32([0.0] * entries))
    chunks = [worker_pb2.PromptLogprobChunk(handle=1, first_position=1 + 128 * index, logprobs=logprobs) for index in range(63)]
    result = worker_pb2.StepResult(step=4, status=worker_pb2.STEP_STATUS_DONE, token_ids=pack_i32([9]), prompt_logprobs=chunks)
    parts = split_result(result)
    assert len(parts) > 1
    assert [(part.part.index, part.part.count) for part in parts] == [(index, len(parts)) for index in range(len(parts))]
    assert all(part.ByteSize() < MAX_STREAM_MESSAGE_BYTES for part in parts)
    assert [chunk.first_position for part in parts for chunk in part.prompt_logprobs] == [chunk.first_position for chunk in chunks]
    assert [part.token_ids for part in parts] == [b""] * (len(parts) - 1) + [pack_i32([9])]


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 3), (2,)])
def test_rows_with_the_whole_vocabulary_are_cut_into_parts_that_join_to_the_same_answer(rows) -> None:
    entries, count = 200, len(rows)
    values = np.arange(count * entries, dtype=np.float32)
    result = worker_pb2.StepResult(
        step=4, status=worker_pb2.STEP_STATUS_DONE, handles=pack_u32([10, 11, 12, 13]), token_counts=pack_i32([1] * 4),
        token_ids=pack_i32([5, 6, 7, 8]), flags=bytes(4), logprob_rows=pack_i32(rows),
        logprobs=types_pb2.Logprobs(
            counts=pack_i32([entries] * count), token_ids=pack_i32(values), values=pack_f32(values), ranks=pack_i32(rows)
        ),
    )  # fmt: skip
    parts = split_result(result, most_bytes=entries * 8 + 100)
    assert len(parts) == count
    joined = {name: b"".join(getattr(part, name) for part in parts) for name in ("handles", "token_counts", "token_ids", "flags")}
    assert joined == {name: getattr(result, name) for name in joined}
    before, scored = 0, []
    for part in parts:
        scored += [before + row for row in unpack_i32(part.logprob_rows).tolist()]
        before += len(part.handles) // 4
    assert scored == list(rows)
    for name in ("counts", "token_ids", "values", "ranks"):
        assert b"".join(getattr(part.logprobs, name) for part in parts) == getattr(result.logprobs, name)
    assert [part.status for part in parts][-1] == worker_pb2.STEP_STATUS_DONE
