"""Names, epochs and calls: the newest stream of a name counts, messages of older lives do not, a repeated call happens once."""

import asyncio
from pathlib import Path

import grpc
import pytest
from deployed import deployment
from played import PlayedFrontend, PlayedWorker, end_of, until, worker_hello
from trivet_proto.errors import ErrorKind
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from trivet_scheduler.metrics import engine_registry


async def test_a_worker_that_dials_anew_takes_over_from_its_older_stream(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        older, frontend = await deployed.worker(), await deployed.frontend()
        older.go.clear()
        frontend.add([1], [1, 2, 3], 10)
        await until(lambda: older.num_held)
        newer = deployed.play(PlayedWorker(deployed.channel))
        await until(lambda: newer.ready.is_set() and older.ended.is_set())
        assert older.error.kind is ErrorKind.ABORTED
        assert "older epoch" in older.error.message
        assert newer.epoch.instance == older.epoch.instance
        assert newer.epoch.counter > older.epoch.counter
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 13))
        assert deployed.engine.num_replicas == 1


async def test_a_worker_whose_name_another_process_takes_is_told_so_and_how_to_mend_it(tmp_path: Path, caplog) -> None:
    async with deployment(tmp_path) as deployed:
        older = await deployed.worker()
        newer = deployed.play(PlayedWorker(deployed.channel, hello=worker_hello(instance=b"another process.")))
        await until(lambda: newer.ready.is_set() and older.ended.is_set())
        assert older.error.kind is ErrorKind.ALREADY_EXISTS
        assert not older.error.retryable
        assert older.error.param == "name"
        assert "worker" in older.error.message
        assert "the name replica" in older.error.message
        assert "--name" in older.error.message
        assert "another process has come as worker replica" in caplog.text
        frontend = await deployed.frontend()
        frontend.add([1], [1, 2, 3], 3)
        await frontend.until_finished(1)
        assert frontend.tokens[1] == [3, 4, 5]


async def test_a_frontend_whose_name_another_process_takes_is_told_so_and_how_to_mend_it(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        older = await deployed.frontend()
        newer = deployed.play(PlayedFrontend(deployed.channel, instance=b"another process."))
        await until(lambda: newer.card is not None and older.ended.is_set())
        assert older.error.kind is ErrorKind.ALREADY_EXISTS
        assert older.error.param == "name"
        assert "the name frontend" in older.error.message
        assert "--name" in older.error.message
        newer.add([1], [1, 2, 3], 3)
        await newer.until_finished(1)


async def test_messages_of_an_older_epoch_are_dropped_and_counted(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        older = await deployed.worker()
        newer = deployed.play(PlayedWorker(deployed.channel))
        await until(lambda: newer.ready.is_set() and older.ended.is_set())
        frontend = await deployed.frontend()
        newer.go.clear()
        frontend.add([1], [1, 2, 3], 10)
        await until(lambda: newer.num_held)
        newer.say(result=worker_pb2.StepResult(epoch=older.epoch, step=1, status=worker_pb2.STEP_STATUS_DONE, last_iteration=True))
        newer.say(ready=worker_pb2.Ready(epoch=older.epoch))
        newer.say(events=worker_pb2.Events(epoch=types_pb2.Epoch(instance=b"another scheduler", counter=newer.epoch.counter)))
        await until(lambda: deployed.engine.totals.stale_messages == 3)
        newer.go.set()
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 13))
        registry = engine_registry(deployed.engine, lambda: deployed.num_streams)
        assert registry.get_sample_value("trivet_stale_messages_total") == 3
        assert registry.get_sample_value("trivet_streams") == 2


async def test_a_refused_hello_does_not_end_the_stream_that_has_its_name(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker = await deployed.worker()
        spoiled = worker_hello()
        spoiled.limits.max_num_seqs = 0
        call = worker_pb2_grpc.WorkerServiceStub(deployed.channel).Attach()
        await call.write(worker_pb2.AttachRequest(hello=spoiled))
        assert (await end_of(call)).kind is ErrorKind.INVALID_ARGUMENT
        assert deployed.engine.num_replicas == 1
        assert not worker.ended.is_set()


async def test_a_restarted_worker_may_bring_another_model_when_it_is_the_only_one(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        older, frontend = await deployed.worker(), await deployed.frontend()
        older.go.clear()
        frontend.add([1], [1, 2, 3], 10)
        await until(lambda: older.num_held)
        newer = deployed.play(PlayedWorker(deployed.channel, hello=worker_hello(weights=b"other")))
        await until(lambda: newer.ready.is_set() and older.ended.is_set())
        await frontend.until_finished(1)
        assert frontend.errors[1].kind == types_pb2.ERROR_KIND_UNAVAILABLE, "its tokens are of a model that is gone"
        await until(lambda: frontend.card.fingerprint.weights == b"other")
        frontend.add([2], [1, 2, 3], 3)
        await frontend.until_finished(2)
        assert frontend.tokens[2] == [3, 4, 5]


async def test_a_frontend_that_dials_anew_ends_its_older_session_with_what_it_asked_for(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, older = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        older.add([1], [1, 2, 3], 10)
        await until(lambda: worker.num_held)
        newer = await deployed.frontend()
        await until(older.ended.is_set)
        assert older.error.kind is ErrorKind.ABORTED
        assert newer.welcome.epoch.counter > older.welcome.epoch.counter
        newer.add([1], [1, 2, 3], 10)
        worker.go.set()
        await newer.until_finished(1)
        assert newer.tokens[1] == list(range(3, 13))
        await until(lambda: not deployed.engine.core.requests)


async def test_of_many_streams_with_one_name_the_newest_stays(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontends = [deployed.play(PlayedFrontend(deployed.channel, "the same")) for _ in range(20)]
        await until(lambda: sum(frontend.ended.is_set() for frontend in frontends) == len(frontends) - 1)
        errors = [frontend.error for frontend in frontends if frontend.ended.is_set()]
        assert {error.kind for error in errors} == {ErrorKind.ABORTED}, errors
        left = next(frontend for frontend in frontends if not frontend.ended.is_set())
        left.add([1], [1], 3)
        await left.until_finished(1)
        await until(lambda: len(deployed.frontends.streams) == 1)


async def test_a_repeated_call_gets_the_first_answer_and_happens_once(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        frontend.add([1], list(range(9)), 1)
        await frontend.until_finished(1)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        reset = engine_pb2.ResetPrefixCacheRequest(call_id=b"c" * 16)
        first = await stub.ResetPrefixCache(reset)
        assert first.blocks_dropped == 2
        frontend.add([2], list(range(9)), 1)
        await frontend.until_finished(2)
        assert (await stub.ResetPrefixCache(reset)).blocks_dropped == 2
        frontend.add([3], list(range(9)), 1)
        await frontend.until_finished(3)
        assert frontend.cached[3] == 8, "the repeated call dropped nothing"
        assert (await stub.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest())).blocks_dropped == 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Resume(engine_pb2.ResumeRequest(call_id=b"short"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_repeated_while_it_is_under_way_waits_for_the_same_answer(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 10)
        await until(lambda: worker.num_held)
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        wait = engine_pb2.PauseRequest(call_id=b"p" * 16, mode=engine_pb2.PAUSE_MODE_WAIT)
        given_up = stub.Pause(wait)
        await until(lambda: deployed.engine.core.paused)
        calls = [asyncio.ensure_future(stub.Pause(wait)) for _ in range(3)]
        given_up.cancel()
        assert not (await asyncio.wait(calls, timeout=0.05))[0], "something runs still"
        worker.go.set()
        await frontend.until_finished(1)
        await asyncio.gather(*calls)
