"""The mock scheduler's side of the session, seen without a frontend: promises of the contract, and faults on cue."""

import asyncio
from pathlib import Path

import grpc
import pytest
from trivet_chassis.rpc import create_channel
from trivet_checkpoint import ModelBundle
from trivet_doubles.mock_frontend import MockFrontend
from trivet_doubles.mock_scheduler import Faults, MockScheduler, MockSchedulerSettings, session
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import expected_output
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

PROMPT = list(range(10, 50))


@pytest.fixture
def address(socket_folder: Path) -> str:
    return f"unix:{socket_folder}/s.sock"


def mock(address: str, model: DoubleModel, faults: Faults | None = None, **settings: object) -> MockScheduler:
    return MockScheduler(MockSchedulerSettings(listen=address, **settings), faults, model=model)  # type: ignore[arg-type]


async def test_every_child_gets_its_tokens_and_one_finish(address: str, model: DoubleModel) -> None:
    async with mock(address, model) as scheduler, MockFrontend(address) as frontend:
        children = frontend.add(PROMPT, max_tokens=9, seed=4, n=2)
        for index, child in enumerate(children):
            assert await child.until_ended() == expected_output(PROMPT, child_seed(4, index), 9, scheduler.law.choices)
            assert child.finish == types_pb2.FINISH_REASON_LENGTH
        (again,) = frontend.add(PROMPT, max_tokens=9, seed=4)
        assert await again.until_ended() == children[0].token_ids
        assert (children[0].cached_tokens, again.cached_tokens) == (0, 32)
        assert scheduler.life.running == 0


async def test_a_request_goes_on_from_what_it_had(address: str, model: DoubleModel) -> None:
    whole = expected_output(PROMPT, 1, 10, model.words)
    had = [engine_pb2.ResumeState(output_token_ids=pack_i32(whole[:4])), engine_pb2.ResumeState(done=True)]
    async with mock(address, model), MockFrontend(address) as frontend:
        running, done = frontend.add(PROMPT, max_tokens=10, seed=1, n=2, resume=had)
        assert await running.until_ended() == whole[4:]
        assert await done.until_ended() == []
        assert done.finish == types_pb2.FINISH_REASON_STOP


async def test_stop_and_abort_are_answered_once_and_a_newer_request_replaces(address: str, model: DoubleModel) -> None:
    async with mock(address, model, step_time=0.005) as scheduler, MockFrontend(address) as frontend:
        stopped, aborted, replaced = [frontend.add(PROMPT, max_tokens=5000, uid=bytes([index]) * 16)[0] for index in range(3)]
        await frontend.until(lambda: min(len(child.token_ids) for child in (stopped, aborted, replaced)) > 2)
        frontend.stop(stopped, 2)
        frontend.abort(aborted)
        (heir,) = frontend.add(PROMPT, max_tokens=3, uid=bytes([2]) * 16)
        for child in (stopped, aborted, heir):
            await child.until_ended()
        assert (stopped.finish, aborted.finish) == (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORT)
        assert not replaced.ended.is_set()
        assert scheduler.life.running == 0


async def test_stop_tokens_limits_and_logprobs(address: str, model: DoubleModel) -> None:
    (end,) = model.end_ids
    forced = types_pb2.SamplingParams(max_tokens=9, min_tokens=3, logit_bias_ids=pack_i32([end]), logit_bias_values=pack_f32([100]))
    scored = types_pb2.SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0)
    async with mock(address, model), MockFrontend(address) as frontend:
        (ended,) = frontend.add(PROMPT, sampling=forced)
        (child,) = frontend.add(PROMPT, sampling=scored)
        assert await ended.until_ended() == [end] * 4
        assert ended.stop_token == end
        tokens = await child.until_ended()
        assert [ids[0] for ids, _ in child.logprobs] == tokens
        assert list(child.prompt_logprobs) == list(range(1, len(PROMPT)))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [([], 1, "empty"), ([10_000], 1, "vocabulary of 499"), (PROMPT, 9000, "more than 8192")],
)
async def test_what_can_never_run_is_refused_on_its_handle(
    address: str, model: DoubleModel, prompt: list[int], max_tokens: int, words: str
) -> None:
    async with mock(address, model), MockFrontend(address) as frontend:
        (child,) = frontend.add(prompt, max_tokens=max_tokens)
        with pytest.raises(TrivetError, match=words) as refused:
            await child.until_ended()
        assert refused.value.kind is ErrorKind.INVALID_ARGUMENT


async def test_the_bundle_and_the_load_are_served_and_the_rest_is_not(address: str, model: DoubleModel) -> None:
    async with mock(address, model), create_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        pieces = [message.chunk.data async for message in stub.GetModelBundle(engine_pb2.GetModelBundleRequest())]
        assert ModelBundle.from_bytes(b"".join(pieces)) == model.bundle
        assert (await stub.GetLoad(engine_pb2.GetLoadRequest())).load.replicas_ready == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Sleep(engine_pb2.SleepRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_more_requests_than_places_wait_for_their_turn(address: str, model: DoubleModel) -> None:
    async with mock(address, model, max_num_seqs=2, step_time=0.002, prompt_token_time=0.0001), MockFrontend(address) as frontend:
        children = [frontend.add([1, 2, 3, index], max_tokens=5)[0] for index in range(5)]
        for index, child in enumerate(children):
            assert await child.until_ended() == expected_output([1, 2, 3, index], 0, 5, model.words)


async def test_every_second_request_is_refused_on_cue(address: str, model: DoubleModel) -> None:
    async with mock(address, model, Faults(refuse_every=2)), MockFrontend(address) as frontend:
        (first,), (second,) = frontend.add(PROMPT), frontend.add(PROMPT)
        assert len(await first.until_ended()) == 16
        with pytest.raises(TrivetError, match="refused on cue") as refused:
            await second.until_ended()
        assert refused.value.kind is ErrorKind.OVERLOADED
        assert refused.value.retry_after_ms == 100


@pytest.mark.parametrize(
    ("faults", "kind", "count"),
    [(Faults(fail_after=3), ErrorKind.INTERNAL, 3), (Faults(end_session_after=5), ErrorKind.UNAVAILABLE, 5)],
)
async def test_a_request_fails_or_its_session_ends_on_cue(
    address: str, model: DoubleModel, faults: Faults, kind: ErrorKind, count: int
) -> None:
    async with mock(address, model, faults), MockFrontend(address) as frontend:
        (child,) = frontend.add(PROMPT)
        with pytest.raises(TrivetError) as failed:
            await child.until_ended()
        assert failed.value.kind is kind
        assert child.token_ids == expected_output(PROMPT, 0, count, model.words)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_stall_has_load_reports_unless_it_is_silent(
    address: str, model: DoubleModel, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.05)
    faults = Faults(stall_after=2, stall_for=0.4, silent=silent)
    async with mock(address, model, faults), MockFrontend(address) as frontend:
        (child,) = frontend.add(PROMPT, max_tokens=4)
        await frontend.until(lambda: len(child.token_ids) == 2)
        frontend.load = None
        await frontend.until(lambda: frontend.load is not None or child.ended.is_set())
        assert child.ended.is_set() is silent
        assert await child.until_ended() == expected_output(PROMPT, 0, 4, model.words)


async def test_garbage_and_rows_that_nobody_asked_for_come_on_cue(address: str, model: DoubleModel) -> None:
    async with mock(address, model, Faults(unknown_rows=True, garbage_after=3)), create_channel(address) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Session()
        await call.write(engine_pb2.SessionRequest(hello=types_pb2.Hello(name="f", schema=types_pb2.Schema(revision=1))))
        add = engine_pb2.Add(handles=b"\1\0\0\0", uid=bytes(16), prompt_token_ids=pack_i32(PROMPT))
        await call.write(engine_pb2.SessionRequest(add=add))
        outputs: list[engine_pb2.StepOutputs] = []
        async with asyncio.timeout(10):
            while len(outputs) < 3:
                message = await call.read()
                outputs += [message.outputs] if message.HasField("outputs") else []
        assert all(len(message.handles) == 8 for message in outputs)
        assert [len(message.token_ids) for message in outputs] == [4, 4, 7]


async def test_a_drain_is_announced_lets_what_runs_go_on_and_refuses_what_comes(address: str, model: DoubleModel) -> None:
    async with mock(address, model, step_time=0.01) as scheduler, MockFrontend(address) as frontend:
        (running,) = frontend.add(PROMPT, max_tokens=30)
        await frontend.until(lambda: running.token_ids)
        draining = asyncio.create_task(scheduler.drain(10))
        await frontend.until(lambda: frontend.draining)
        (late,) = frontend.add(PROMPT)
        with pytest.raises(TrivetError, match="shutting down") as refused:
            await late.until_ended()
        assert refused.value.kind is ErrorKind.UNAVAILABLE
        assert len(await running.until_ended()) == 30
        await asyncio.wait_for(draining, 10)
