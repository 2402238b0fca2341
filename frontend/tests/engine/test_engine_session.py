"""The session over a real stream: hello, deltas by handle, aborts, loss and return of the scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from trivet_chassis.clock import SystemClock
from trivet_frontend.engine import (
    AbortReason,
    EngineClient,
    EngineRequest,
    FinishReason,
    ModelDescription,
    SamplingParams,
    TokenStream,
    identity_of,
)
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import unpack_u32
from trivet_proto.v1 import engine_pb2


def request_of(*, max_tokens: int = 4, n: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> EngineRequest:
    return EngineRequest(uid=b"u" * 16, prompt_ids=prompt, sampling=SamplingParams(seed=1, max_tokens=max_tokens), n=n)


@contextlib.asynccontextmanager
async def engine_of(*addresses: str, slow_client_timeout: float = 30, handover_timeout: float = 0) -> AsyncIterator[EngineClient]:
    engine = EngineClient(
        addresses,
        identity=identity_of("test"),
        clock=SystemClock(),
        slow_client_timeout=slow_client_timeout,
        handover_timeout=handover_timeout,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until_ready(engine: EngineClient, *, ready: bool = True) -> None:
    async with asyncio.timeout(10):
        while engine.ready is not ready:
            await engine.changes.after(engine.changes.count)


async def all_tokens(stream: TokenStream) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    while True:
        delta = await stream.next()
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            return tokens, delta.finish_reason


def known(engine: EngineClient) -> ModelDescription:
    assert engine.model is not None
    return engine.model


async def test_the_session_says_hello_and_learns_the_model(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        model = await engine.wait_for_model()
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (49152, 8192, (2,))
    assert scheduler.hellos[0].name == "test"
    assert len(scheduler.hellos[0].instance) == 16


async def test_children_get_their_own_tokens_in_order(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        submission = engine.submit(request_of(n=3), model=known(engine))
        results = await asyncio.gather(*(all_tokens(stream) for stream in submission.streams))
    assert [tokens for tokens, _ in results] == [scheduler.script(scheduler.adds[0], index) for index in range(3)]
    assert {finish for _, finish in results} == {FinishReason.LENGTH}
    assert [stream.delivered.tolist() for stream in submission.streams] == [tokens for tokens, _ in results]
    assert len(set(unpack_u32(scheduler.adds[0].handles).tolist())) == 3


async def test_a_reader_that_waits_gets_merged_deltas(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        [stream] = engine.submit(request_of(max_tokens=20), model=known(engine)).streams
        async with asyncio.timeout(5):
            while not stream.ended:
                await asyncio.sleep(0.01)
        delta = await stream.next()
    assert len(delta.token_ids) == 20
    assert delta.finish_reason is FinishReason.LENGTH


async def test_an_abort_reaches_the_scheduler_once_and_for_live_children_only(scheduler) -> None:
    scheduler.flowing.clear()
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        submission = engine.submit(request_of(n=2), model=known(engine))
        await scheduler.until(lambda: len(scheduler.live) == 2)
        submission.abort(AbortReason.CLIENT_GONE)
        submission.abort(AbortReason.CLIENT_GONE)
        await scheduler.until(lambda: not scheduler.live)
        assert engine.live_streams == 0
        async with asyncio.timeout(5):
            while engine.handles:
                await asyncio.sleep(0.01)
    assert scheduler.aborted == [stream.handle for stream in submission.streams]
    assert set(scheduler.abort_reasons) == {engine_pb2.ABORT_REASON_CLIENT_GONE}


async def test_a_lost_scheduler_fails_its_requests_as_retryable_and_is_dialled_again(scheduler) -> None:
    scheduler.flowing.clear()
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        [stream] = engine.submit(request_of(), model=known(engine)).streams
        await scheduler.until(lambda: bool(scheduler.live))
        scheduler.kill.set()
        with pytest.raises(TrivetError, match="went away") as caught:
            await all_tokens(stream)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert caught.value.retryable
        scheduler.kill.clear()
        scheduler.flowing.set()
        await until_ready(engine)
        [stream] = engine.submit(request_of(), model=known(engine)).streams
        assert (await all_tokens(stream))[1] is FinishReason.LENGTH
    assert len(scheduler.hellos) >= 2
    assert scheduler.hellos[0].instance == scheduler.hellos[-1].instance


async def test_a_name_that_another_frontend_has_taken_is_not_taken_back(scheduler, caplog) -> None:
    scheduler.name_taken = "another frontend has come under the name test: give each frontend its own --name"
    async with engine_of(scheduler.address) as engine, asyncio.timeout(10):
        await until_ready(engine)
        scheduler.kill.set()
        reason = await engine.until_displaced()
        assert (reason.kind, reason.message) == (ErrorKind.ALREADY_EXISTS, scheduler.name_taken)
        assert not engine.addresses, "no session is left that would dial"
        assert not engine.ready
    assert len(scheduler.hellos) == 1
    assert f"is not dialled again: {scheduler.name_taken}" in caplog.text


async def test_a_scheduler_without_workers_takes_no_requests(scheduler) -> None:
    scheduler.replicas_ready = 0
    async with engine_of(scheduler.address) as engine:
        model = await engine.wait_for_model()
        with pytest.raises(TrivetError) as caught:
            engine.submit(request_of(), model=model)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        scheduler.replicas_ready = 1
        await until_ready(engine)
        scheduler.replicas_ready = 0
        await until_ready(engine, ready=False)


async def test_a_reader_that_never_comes_is_cut_off(scheduler) -> None:
    async with engine_of(scheduler.address, slow_client_timeout=0.1) as engine:
        await until_ready(engine)
        scheduler.pause_after = 2
        [stream] = engine.submit(request_of(max_tokens=50), model=known(engine)).streams
        await scheduler.until(lambda: bool(scheduler.aborted))
        assert scheduler.abort_reasons == [engine_pb2.ABORT_REASON_SLOW_CLIENT]
        await stream.next()  # what had come before is still there
        with pytest.raises(TrivetError) as caught:
            await stream.next()
        assert caught.value.kind is ErrorKind.CANCELLED


async def test_an_error_of_one_child_is_its_own(scheduler) -> None:
    scheduler.refusal = TrivetError(ErrorKind.INVALID_ARGUMENT, "no", param="prompt")
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        [stream] = engine.submit(request_of(), model=known(engine)).streams
        with pytest.raises(TrivetError, match="no"):
            await all_tokens(stream)
        scheduler.refusal = None
        [stream] = engine.submit(request_of(), model=known(engine)).streams
        assert len((await all_tokens(stream))[0]) == 4


async def test_the_bundle_is_fetched_once_and_checked(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        model = await engine.wait_for_model()
        bundle = await engine.fetch_bundle(model)
        assert bundle == scheduler.bundle
        scheduler.bundle = b"changed"
        assert await engine.fetch_bundle(model) == bundle


async def test_a_bundle_of_another_digest_is_refused(scheduler) -> None:
    scheduler.bundle += b"!"
    async with engine_of(scheduler.address) as engine:
        model = await engine.wait_for_model()
        with pytest.raises(TrivetError, match="digest"):
            await engine.fetch_bundle(model)


async def test_handles_are_not_reused_after_a_reconnect(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        await until_ready(engine)
        [first] = engine.submit(request_of(), model=known(engine)).streams
        await all_tokens(first)
        scheduler.kill.set()
        await until_ready(engine, ready=False)
        scheduler.kill.clear()
        await until_ready(engine)
        [second] = engine.submit(request_of(), model=known(engine)).streams
        await all_tokens(second)
    assert second.handle > first.handle
