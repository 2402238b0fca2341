"""Messages damaged at random: whatever they say, they are taken or refused with an error of ours, and the engine goes on."""

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played import BUNDLE, DIGEST, PlayedWorker, an_add, worker_hello
from trivet_chassis.clock import ManualClock
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_f32, pack_i32, pack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, types_pb2, worker_pb2
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.replicas.link import WorkerLink
from trivet_scheduler.rpc.session import FrontendSession

Damage = list[tuple[int, int, bytes]]
damages = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4)
thoroughly = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def damaged(message: Message, damage: Damage) -> Message | None:
    """With some bytes cut out and others put in; None when nothing can be read any more."""
    data = message.SerializeToString()
    for place, cut, put in damage:
        at = place % (len(data) + 1)
        data = data[:at] + put + data[at + cut :]
    try:
        return type(message).FromString(data)
    except DecodeError:
        return None


def take(consume: Callable[[Message], object], message: Message | None) -> bool:
    """Whether it was taken. Any error but ours fails the test."""
    if message is None:
        return False
    try:
        consume(message)
    except TrivetError:
        return False
    return True


def an_engine() -> tuple[Engine, WorkerLink]:
    """With one worker attached, which answers nothing by itself."""
    engine = Engine(SchedulerSettings(), ManualClock())
    engine.bundles.put(DIGEST, BUNDLE)
    link = WorkerLink(engine, default_registry(), worker_hello())
    link.take(worker_pb2.AttachRequest(ready=worker_pb2.Ready(epoch=link.epoch)))
    return engine, link


def a_session(engine: Engine, name: str) -> FrontendSession:
    session = FrontendSession(engine, types_pb2.Hello(name=name, instance=bytes(16), schema=SCHEMA))
    engine.add_session(session)
    return session


def answer_all(link: WorkerLink, engine: Engine, played: PlayedWorker) -> None:
    """Answer steps until there are none."""
    while link.replica.flights:
        message = link._out.get_nowait()  # what the stream would write
        if message.HasField("step"):
            link.take(worker_pb2.AttachRequest(result=played.answer(message.step)))


def a_played_worker(link: WorkerLink) -> PlayedWorker:
    played = PlayedWorker.__new__(PlayedWorker)
    played.epoch, played._lengths = link.epoch, {}
    return played


ADD = an_add(
    [7, 8],
    [1, 2, 3, 4, 5],
    6,
    request_id="id",
    cache_salt="salt",
    timeout_ms=60_000,
    resume=[engine_pb2.ResumeState(output_token_ids=pack_i32([6])), engine_pb2.ResumeState()],
)
ADD.sampling.MergeFrom(
    types_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.5,
        logit_bias_ids=pack_i32([1]),
        logit_bias_values=pack_f32([1]),
        bad_words_ids=pack_i32([1, 2]),
        bad_words_counts=pack_i32([2]),
        stop_token_ids=pack_i32([3]),
        logprobs=2,
        prompt_logprobs=1,
    )
)
SESSION_MESSAGES = (
    engine_pb2.SessionRequest(add=ADD),
    engine_pb2.SessionRequest(stop=engine_pb2.Stop(handles=pack_u32([7]), counts=pack_i32([1]))),
    engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=pack_u32([7, 8]))),
)


@thoroughly
@given(st.sampled_from(SESSION_MESSAGES), damages)
async def test_a_damaged_message_of_a_frontend_harms_nobody_else(message: engine_pb2.SessionRequest, damage: Damage) -> None:
    engine, link = an_engine()
    bystander, offender = a_session(engine, "bystander"), a_session(engine, "offender")
    bystander.take(engine_pb2.SessionRequest(add=an_add([1], [1, 2, 3], 5)))
    if not take(offender.take, damaged(message, damage)):
        offender.stream.decide(None)
    await asyncio.sleep(0)
    offender.stream.decide(None)
    answer_all(link, engine, a_played_worker(link))
    tokens: list[int] = []
    while (said := bystander.outbox._take()) is not None:
        tokens += list(memoryview(said.outputs.token_ids).cast("i"))
    assert tokens == [3, 4, 5, 6, 7]
    assert not engine.core.requests


@thoroughly
@given(damages)
async def test_a_damaged_hello_of_a_worker_is_refused_or_understood(damage: Damage) -> None:
    engine, _ = an_engine()
    message = damaged(worker_hello("another"), damage)
    take(lambda hello: WorkerLink(engine, default_registry(), hello), message)
    assert engine.num_replicas == 1


@thoroughly
@given(damages)
async def test_a_damaged_result_is_refused_or_understood(damage: Damage) -> None:
    engine, link = an_engine()
    session = a_session(engine, "frontend")
    add = an_add([1], [1, 2, 3], 5)
    add.sampling.logprobs = add.sampling.prompt_logprobs = 1
    session.take(engine_pb2.SessionRequest(add=add))
    await asyncio.sleep(0)
    played = a_played_worker(link)
    step = link._out.get_nowait().step
    result = played.answer(step)
    result.logprob_rows = pack_i32([0])
    result.logprobs.CopyFrom(
        types_pb2.Logprobs(counts=pack_i32([2]), token_ids=pack_i32([3, 4]), values=pack_f32([-1, -2]), ranks=pack_i32([1]))
    )
    result.prompt_logprobs.add(handle=1, first_position=1, logprobs=types_pb2.Logprobs(counts=pack_i32([1]), token_ids=pack_i32([2])))
    result.prompt_logprobs[0].logprobs.values, result.prompt_logprobs[0].logprobs.ranks = pack_f32([-1]), pack_i32([1])
    message = damaged(worker_pb2.AttachRequest(result=result), damage)
    if not take(link.take, message):
        link.stream.decide(None)
        assert engine.num_replicas == 0
        assert len(engine.core.waiting) == len(engine.core.requests)
    while session.outbox._take() is not None:
        pass  # what was let through can be said
