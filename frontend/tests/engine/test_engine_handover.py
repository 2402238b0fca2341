"""Requests whose scheduler is lost, drains or gives them back: they go on elsewhere from what was delivered, or end in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from trivet_chassis.clock import SystemClock
from trivet_frontend.engine import (
    AbortReason,
    EngineClient,
    EngineRequest,
    FinishReason,
    SamplingParams,
    Submission,
    TokenDelta,
    TokenStream,
    identity_of,
)
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import unpack_i32

LENGTH = 12


@contextlib.asynccontextmanager
async def engine_of(*addresses: str, handover_timeout: float = 20) -> AsyncIterator[EngineClient]:
    engine = EngineClient(
        addresses, identity=identity_of("test"), clock=SystemClock(), slow_client_timeout=30, handover_timeout=handover_timeout
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until(engine: EngineClient, condition: Callable[[], bool]) -> None:
    """Return when `condition` holds of the engine."""
    async with asyncio.timeout(10):
        while True:
            seen = engine.changes.count
            if condition():
                return
            await engine.changes.after(seen)


async def begin(engine: EngineClient, **facts: object) -> Submission:
    """A request on the first scheduler that is ready."""
    await until(engine, lambda: engine.ready)
    sampling = SamplingParams(seed=1, max_tokens=LENGTH, logprobs=1, prompt_logprobs=0)
    request = EngineRequest(uid=b"u" * 16, prompt_ids=(1, 2, 3), sampling=sampling, **facts)
    assert engine.model is not None
    return engine.submit(request, model=engine.model)


async def rest_of(stream: TokenStream) -> TokenDelta:
    """All that a stream still gives, in one; raises what it ends with."""
    whole = await stream.next()
    async with asyncio.timeout(10):
        while whole.finish_reason is None:
            whole.merge(await stream.next())
    return whole


async def some_of(stream: TokenStream, count: int) -> TokenDelta:
    """At least `count` tokens."""
    whole = TokenDelta()
    async with asyncio.timeout(10):
        while len(whole.token_ids) < count:
            whole.merge(await stream.next())
    return whole


async def both_known(engine: EngineClient) -> None:
    await until(engine, lambda: len(engine.loads()) == 2)


async def test_a_lost_request_goes_on_elsewhere_without_gap_or_repetition(new_scheduler, serve) -> None:
    first, second = new_scheduler("first", pause_after=4), new_scheduler("second")
    async with engine_of(first.address, second.address) as engine, serve(first):
        submission = await begin(engine, n=2)
        # Of the second child nothing is read yet: what was delivered to it counts all the same.
        heads = [await some_of(submission.streams[0], 4), TokenDelta()]
        await first.until(lambda: len(submission.streams[1].delivered) == 4)
        async with serve(second):
            await both_known(engine)
            first.kill.set()
            for head, stream in zip(heads, submission.streams, strict=True):
                head.merge(await rest_of(stream))
            assert engine.handles == 0
    [add] = second.adds
    assert add.uid == first.adds[0].uid
    assert [unpack_i32(state.output_token_ids).tolist() for state in add.resume] == [head.token_ids[:4] for head in heads]
    for index, head in enumerate(heads):
        assert head.token_ids == first.script(add, index)
        assert head.finish_reason is FinishReason.LENGTH
        assert head.logprobs is not None
        assert [row[0] for row in head.logprobs.token_ids] == head.token_ids
        assert head.prompt_logprobs is not None
        assert [row[0] for row in head.prompt_logprobs.token_ids] == [2, 3]


async def test_the_same_scheduler_takes_a_request_up_when_it_is_back(new_scheduler, serve) -> None:
    fake = new_scheduler("only", pause_after=4)
    async with engine_of(fake.address) as engine:
        async with serve(fake):
            submission = await begin(engine)
            head = await some_of(submission.streams[0], 4)
        await until(engine, lambda: not engine.ready)
        fake.pause_after, fake.instance = None, b"another process."
        async with serve(fake):
            head.merge(await rest_of(submission.streams[0]))
    assert head.token_ids == fake.script(fake.adds[0], 0)


async def test_what_was_not_begun_is_sent_as_new(new_scheduler, serve) -> None:
    first, second = new_scheduler("first"), new_scheduler("second")
    first.flowing.clear()
    async with engine_of(first.address, second.address) as engine:
        async with serve(first):
            submission = await begin(engine)
            await first.until(lambda: bool(first.live))
        async with serve(second):
            assert len((await rest_of(submission.streams[0])).token_ids) == LENGTH
    assert not second.adds[0].resume


async def test_children_that_ended_stay_ended(new_scheduler, serve) -> None:
    first, second = new_scheduler("first", pause_after=4), new_scheduler("second")
    async with engine_of(first.address, second.address) as engine:
        async with serve(first):
            submission = await begin(engine, n=3)
            for stream in submission.streams:
                await some_of(stream, 4)
            submission.stop(submission.streams[0], 2)
            submission.abort_streams((submission.streams[1],), AbortReason.CLIENT_GONE)
        async with serve(second):
            await rest_of(submission.streams[2])
    assert [state.done for state in second.adds[0].resume] == [True, True, False]
    assert len(second.live) == 0


async def test_with_nobody_to_go_on_the_stream_ends_in_time_with_a_retryable_error(new_scheduler, serve) -> None:
    fake = new_scheduler("only", pause_after=4)
    async with engine_of(fake.address, handover_timeout=0.3) as engine:
        async with serve(fake):
            submission = await begin(engine)
            await some_of(submission.streams[0], 4)
        with pytest.raises(TrivetError, match="went away") as caught:
            await rest_of(submission.streams[0])
        assert (caught.value.kind, caught.value.retryable) == (ErrorKind.UNAVAILABLE, True)
        assert engine.handles == 0


async def test_a_scheduler_of_another_model_takes_nothing_over(new_scheduler, serve) -> None:
    first, second = new_scheduler("first", pause_after=4), new_scheduler("second", weights=b"v" * 32)
    async with engine_of(first.address, second.address, handover_timeout=0.3) as engine, serve(first):
        submission = await begin(engine)
        await some_of(submission.streams[0], 4)
        async with serve(second):
            await both_known(engine)
            first.kill.set()
            with pytest.raises(TrivetError, match="went away"):
                await rest_of(submission.streams[0])
    assert second.adds == []


async def test_a_request_that_ends_between_two_schedulers_goes_to_none(new_scheduler, serve) -> None:
    first, second = new_scheduler("first", pause_after=4), new_scheduler("second")
    async with engine_of(first.address, second.address) as engine:
        async with serve(first):
            submission = await begin(engine)
            await some_of(submission.streams[0], 4)
        await until(engine, lambda: not engine.ready)
        submission.abort(AbortReason.CLIENT_GONE)
        assert engine.handles == 0
        async with serve(second):
            await until(engine, lambda: engine.ready)
    assert second.adds == []


async def test_a_scheduler_that_drains_hands_over_what_waits_and_finishes_what_runs(new_scheduler, serve) -> None:
    first, second = new_scheduler("first"), new_scheduler("second")
    first.pause_after = 4
    async with engine_of(first.address, second.address) as engine, serve(first):
        running = await begin(engine)
        head = await some_of(running.streams[0], 4)
        first.flowing.clear()
        waiting = await begin(engine)
        await first.until(lambda: len(first.live) == 2)
        async with serve(second):
            await both_known(engine)
            first.drain()
            assert len((await rest_of(waiting.streams[0])).token_ids) == LENGTH
            assert len(second.adds) == 1
            await first.until(lambda: len(first.live) == 1)
            [handle] = first.live
            first.failure = TrivetError(ErrorKind.UNAVAILABLE, "the drain is over")
            first.fail(handle)
            head.merge(await rest_of(running.streams[0]))
    assert head.token_ids == first.script(first.adds[0], 0)
    assert [len(add.resume) for add in second.adds] == [0, 1]


async def test_a_request_that_is_given_back_is_offered_again_and_not_at_once(new_scheduler, serve) -> None:
    fake = new_scheduler("only", refusal=TrivetError(ErrorKind.UNAVAILABLE, "the worker has just gone"))
    async with engine_of(fake.address) as engine, serve(fake):
        submission = await begin(engine)
        await fake.until(lambda: len(fake.adds) == 3)
        fake.refusal = None
        assert len((await rest_of(submission.streams[0])).token_ids) == LENGTH
        assert len(fake.adds) == 4
        assert engine.handles == 0


async def test_refusals_end_with_the_schedulers_own_words(new_scheduler, serve) -> None:
    fakes = [new_scheduler(name, refusal=TrivetError(ErrorKind.UNAVAILABLE, "no worker here")) for name in ("first", "second")]
    async with engine_of(*(fake.address for fake in fakes), handover_timeout=0.5) as engine, serve(fakes[0]), serve(fakes[1]):
        await both_known(engine)
        submission = await begin(engine)
        with pytest.raises(TrivetError, match="no worker here"):
            await rest_of(submission.streams[0])
        # Both were asked, and neither in a tight loop.
        assert all(0 < len(fake.adds) < 10 for fake in fakes)


async def test_what_no_repetition_would_mend_is_not_repeated(new_scheduler, serve) -> None:
    fake = new_scheduler("only")
    async with engine_of(fake.address) as engine, serve(fake):
        for error in (TrivetError(ErrorKind.INTERNAL, "no"), TrivetError(ErrorKind.UNAVAILABLE, "no", retryable=False)):
            fake.refusal = error
            submission = await begin(engine)
            with pytest.raises(TrivetError, match="no"):
                await rest_of(submission.streams[0])
    assert len(fake.adds) == 2


async def test_a_request_that_is_lost_again_and_again_is_given_up(new_scheduler, serve) -> None:
    fake = new_scheduler("only")
    fake.flowing.clear()
    async with engine_of(fake.address) as engine, serve(fake):
        submission = await begin(engine)
        for adds in (1, 2, 3):
            await fake.until(lambda adds=adds: len(fake.adds) == adds and bool(fake.outboxes))
            fake.outboxes[0].put_nowait(None)
        with pytest.raises(TrivetError, match="went away"):
            await rest_of(submission.streams[0])
    assert len(fake.adds) == 3


async def test_the_time_limit_of_a_request_ends_it_wherever_it_is(new_scheduler, serve) -> None:
    fake = new_scheduler("only")
    fake.flowing.clear()
    async with engine_of(fake.address) as engine:
        async with serve(fake):
            submission = await begin(engine, timeout_ms=200)
            with pytest.raises(TrivetError) as caught:
                await rest_of(submission.streams[0])
            assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
            await fake.until(lambda: not fake.live)
            assert 0 < fake.adds[0].timeout_ms <= 200
            submission = await begin(engine, timeout_ms=500)
        with pytest.raises(TrivetError) as caught:
            await rest_of(submission.streams[0])
        assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
