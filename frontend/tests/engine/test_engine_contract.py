"""A scheduler that breaks the contract loses its stream and nothing else; lists of schedulers change under running requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from trivet_chassis.clock import SystemClock
from trivet_frontend.engine import EngineClient, EngineRequest, SamplingParams, Submission, identity_of
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, pack_u8, pack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

LENGTH = 12


@contextlib.asynccontextmanager
async def engine_of(*addresses: str, **settings: object) -> AsyncIterator[EngineClient]:
    engine = EngineClient(addresses, identity=identity_of("test"), clock=SystemClock(), slow_client_timeout=30, **settings)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until(engine: EngineClient, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            seen = engine.changes.count
            if condition():
                return
            await engine.changes.after(seen)


async def begin(engine: EngineClient) -> Submission:
    await until(engine, lambda: engine.ready)
    request = EngineRequest(uid=b"u" * 16, prompt_ids=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=LENGTH))
    assert engine.model is not None
    return engine.submit(request, model=engine.model)


async def tokens_of(submission: Submission) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(10):
        while True:
            delta = await submission.streams[0].next()
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens


def outputs(**fields: object) -> engine_pb2.SessionResponse:
    return engine_pb2.SessionResponse(outputs=engine_pb2.StepOutputs(**fields))


def row(handle: int, finish: int = 0) -> engine_pb2.SessionResponse:
    return outputs(handles=pack_u32([handle]), token_counts=pack_i32([1]), token_ids=pack_i32([1000]), finish_reasons=pack_u8([finish]))


BROKEN = {
    "arrays of broken length": outputs(handles=b"abc"),
    "rows that do not match": outputs(handles=pack_u32([1]), token_counts=pack_i32([2, 3]), finish_reasons=pack_u8([0])),
    "tokens that are none": outputs(
        handles=pack_u32([1]), token_counts=pack_i32([1]), token_ids=pack_i32([-7]), finish_reasons=pack_u8([0])
    ),
    "an unknown handle": row(77),
    "an error for an unknown handle": outputs(errors=[engine_pb2.RowError(handle=77, error=types_pb2.Error(message="no"))]),
    "prompt logprobs out of order": outputs(
        prompt_logprobs=[engine_pb2.PromptLogprobs(handle=1, first_position=9, logprobs=types_pb2.Logprobs())]
    ),
    "a model that is none": engine_pb2.SessionResponse(model=engine_pb2.Model(card=types_pb2.ModelCard())),
    "an error of the stream": engine_pb2.SessionResponse(error=types_pb2.Error(message="I give up")),
}


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_message_ends_the_stream_and_the_request_goes_on(scheduler, message: engine_pb2.SessionResponse) -> None:
    scheduler.flowing.clear()
    async with engine_of(scheduler.address) as engine:
        submission = await begin(engine)
        await scheduler.until(lambda: bool(scheduler.live))
        scheduler.say(message)
        await scheduler.until(lambda: len(scheduler.adds) == 2)
        scheduler.flowing.set()
        assert await tokens_of(submission) == scheduler.script(scheduler.adds[0], 0)
        assert (len(scheduler.hellos), engine.handles) == (2, 0)


async def test_a_row_after_the_finish_ends_the_stream(scheduler) -> None:
    async with engine_of(scheduler.address) as engine:
        await tokens_of(await begin(engine))
        scheduler.say(row(1))
        async with asyncio.timeout(10):
            while len(scheduler.hellos) < 2:
                await asyncio.sleep(0.01)
        assert await tokens_of(await begin(engine))


async def test_a_scheduler_that_always_answers_with_garbage_fails_its_requests_typed(scheduler) -> None:
    scheduler.flowing.clear()
    async with engine_of(scheduler.address) as engine:
        submission = await begin(engine)

        async def spoil() -> None:
            for adds in (1, 2, 3):
                await scheduler.until(lambda adds=adds: len(scheduler.adds) == adds and bool(scheduler.live))
                scheduler.say(BROKEN["arrays of broken length"])

        spoiling = asyncio.create_task(spoil())
        with pytest.raises(TrivetError, match="went away"):
            await tokens_of(submission)
        await spoiling


async def test_a_finish_with_an_error_that_has_no_words_is_an_error(scheduler) -> None:
    scheduler.flowing.clear()
    async with engine_of(scheduler.address) as engine:
        submission = await begin(engine)
        await scheduler.until(lambda: bool(scheduler.live))
        scheduler.say(row(submission.streams[0].handle, types_pb2.FINISH_REASON_ERROR))
        with pytest.raises(TrivetError, match="did not say why"):
            await tokens_of(submission)


async def test_a_scheduler_that_falls_silent_is_lost_within_the_limit(scheduler, monkeypatch) -> None:
    monkeypatch.setattr("trivet_frontend.engine.conversation.HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr("trivet_frontend.engine.conversation.SILENCE_LIMIT_SECONDS", 0.3)
    async with engine_of(scheduler.address) as engine:
        await begin(engine)
        scheduler.silent = True
        await until(engine, lambda: not engine.ready)
        scheduler.silent = False
        await until(engine, lambda: engine.ready)


# ---- lists that change ----


class Zone:
    """A name server of this process."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.asked = 0
        self._asked = asyncio.Event()

    async def look_up(self, name: str) -> Sequence[str]:
        self.asked += 1
        self._asked.set()
        return self.hosts

    async def until_asked(self, times: int) -> None:
        """Return when it was asked so many times more."""
        enough = self.asked + times
        async with asyncio.timeout(10):
            while self.asked < enough:
                self._asked.clear()
                await self._asked.wait()


async def free_port(hosts: Sequence[str]) -> int:
    """A port that is free at each of `hosts`."""
    servers = [await asyncio.start_server(lambda reader, writer: None, hosts[0], 0)]
    port: int = servers[0].sockets[0].getsockname()[1]
    servers += [await asyncio.start_server(lambda reader, writer: None, host, port) for host in hosts[1:]]
    for server in servers:
        server.close()
        await server.wait_closed()
    return port


async def test_every_address_of_a_name_has_a_session_until_it_is_gone_and_ended(new_scheduler, serve) -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    port = await free_port(hosts)
    one, two = (new_scheduler(name, address=f"{host}:{port}") for name, host in zip(("one", "two"), hosts, strict=True))
    zone = Zone(hosts[0])
    one.pause_after = 4
    async with serve(one), engine_of(f"dns:schedulers:{port}", lookup=zone.look_up, resolve_interval=0.05) as engine:
        submission = await begin(engine)
        await one.until(lambda: len(submission.streams[0].delivered) == 4)
        async with serve(two):
            zone.hosts = list(hosts)
            await until(engine, lambda: {name for name, _ in engine.loads()} == {"one", "two"})
            zone.hosts = [hosts[1]]
            await zone.until_asked(3)
            # Gone from the list, but it has not ended: what runs there stays.
            assert len(one.live) == 1
            assert engine.addresses == (one.address, two.address)
            one.kill.set()
            assert await tokens_of(submission) == one.script(one.adds[0], 0)
            await until(engine, lambda: engine.addresses == (two.address,))


async def test_two_addresses_of_one_scheduler_make_one_session(new_scheduler, serve) -> None:
    fake = new_scheduler("one")
    twin = new_scheduler("twin", instance=fake.instance)
    async with serve(fake), serve(twin), engine_of(fake.address, twin.address) as engine:
        # A scheduler keeps one stream a frontend: the older ends when the newer comes.
        await until(engine, lambda: engine.ready and bool(fake.outboxes) and bool(twin.outboxes))
        fake.outboxes[0].put_nowait(None)
        await until(engine, lambda: [name for name, _ in engine.loads()] == ["twin"])
        await fake.until(lambda: not fake.outboxes)  # the fake sees the end of its stream in a turn of its own
        hellos = len(fake.hellos) + len(twin.hellos)
        twin.outboxes[0].put_nowait(None)
        # Either address may be the quicker one; never both.
        await until(engine, lambda: engine.ready and len(fake.hellos) + len(twin.hellos) > hellos)
        assert len(engine.loads()) == 1
