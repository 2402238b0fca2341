"""Several workers: all work, and what a lost or leaving one had goes on elsewhere without a token lost or repeated."""

from pathlib import Path

from deployed import Deployment, deployment
from played import PlayedFrontend, PlayedWorker, until
from trivet_proto.errors import ErrorKind
from trivet_proto.packing import pack_i32
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2, worker_pb2
from trivet_scheduler.awake import Pulse
from trivet_scheduler.metrics import engine_registry
from trivet_scheduler.report import load_report

REQUESTS = range(1, 13)
NO_BEAT = Pulse(beat_s=1000, silence_s=4000)


def add_all(frontend: PlayedFrontend) -> None:
    for handle in REQUESTS:
        frontend.add([handle], range(50 * handle, 50 * handle + 3), 20)


def assert_whole(frontend: PlayedFrontend) -> None:
    assert frontend.tokens == {handle: list(range(3, 23)) for handle in REQUESTS}
    assert set(frontend.finishes.values()) == {types_pb2.FINISH_REASON_LENGTH}


async def two_at_work(deployed: Deployment) -> tuple[PlayedWorker, PlayedWorker, PlayedFrontend]:
    """Both in the middle of it."""
    one, two = await deployed.worker("one"), await deployed.worker("two")
    frontend = await deployed.frontend()
    one.go.clear()
    two.go.clear()
    add_all(frontend)
    await until(lambda: one.num_held and two.num_held)
    return one, two, frontend


async def test_both_of_two_workers_work(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        one, two, frontend = await two_at_work(deployed)
        one.go.set()
        two.go.set()
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)
        assert one.answered > 5
        assert two.answered > 5
        await until(lambda: load_report(deployed.engine).blocks_in_use == 0)


async def test_what_a_lost_worker_had_goes_on_with_the_other(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        one, two, frontend = await two_at_work(deployed)
        one.go.set()
        await until(lambda: one.answered >= 4)
        one.call.cancel()
        two.go.set()
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)
        registry = engine_registry(deployed.engine, lambda: deployed.num_streams)
        assert registry.get_sample_value("trivet_replicas_lost_total") == 1
        assert registry.get_sample_value("trivet_requests_requeued_total") > 0
        assert registry.get_sample_value("trivet_replicas_ready") == 1
        await until(lambda: load_report(deployed.engine).blocks_in_use == 0)


async def test_a_worker_that_says_it_is_lost_is_believed(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        one, two, frontend = await two_at_work(deployed)
        one.say(lost=worker_pb2.Lost(rank=1, reason="its device is gone"))
        two.go.set()
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)
        await until(one.ended.is_set)
        assert one.error.kind is ErrorKind.UNAVAILABLE
        assert "its device is gone" in one.error.message


async def test_the_only_worker_is_lost_and_returns(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        add_all(frontend)
        await until(lambda: worker.num_held)
        worker.go.set()
        await until(lambda: worker.answered >= 6)
        worker.call.cancel()
        await until(lambda: deployed.engine.num_replicas == 0)
        assert not deployed.engine.is_ready
        late = max(REQUESTS) + 1
        frontend.add([late], [1, 2, 3], 20)
        await until(lambda: len(deployed.engine.core.waiting) == len(deployed.engine.core.requests) > 1)
        again = await deployed.worker()
        await frontend.until_finished(*REQUESTS, late)
        assert frontend.tokens.pop(late) == list(range(3, 23))
        assert_whole(frontend)
        assert again.epoch.counter > worker.epoch.counter


async def test_frontends_hear_at_once_how_many_workers_are_ready(tmp_path: Path) -> None:
    """Not with the next beat: until then they would turn requests away that can be served, or send what nobody serves."""
    async with deployment(tmp_path, NO_BEAT) as deployed:
        frontend = await deployed.frontend()
        one = await deployed.worker("one")
        await until(lambda: frontend.load.replicas_ready == 1)
        two = await deployed.worker("two")
        await until(lambda: frontend.load.replicas_ready == 2)
        one.call.cancel()
        await until(lambda: frontend.load.replicas_ready == 1)
        two.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: two.num_held)
        two.say(draining=types_pb2.Draining(deadline_ms=60_000))
        await until(lambda: frontend.load.replicas_ready == 0)
        await deployed.worker("one")
        await until(lambda: frontend.load.replicas_ready == 1)
        two.go.set()
        await frontend.until_finished(1)
        deployed.engine.begin_draining()
        await until(lambda: frontend.load.replicas_ready == 0)


async def test_frontends_hear_at_once_of_a_pause_and_of_its_end(tmp_path: Path) -> None:
    async with deployment(tmp_path, NO_BEAT) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        await stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_ABORT))
        await until(lambda: frontend.load.paused)
        await stub.Resume(engine_pb2.ResumeRequest())
        await until(lambda: not frontend.load.paused)


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        one, two, frontend = await two_at_work(deployed)
        one.say(draining=types_pb2.Draining(deadline_ms=60_000))
        await until(lambda: deployed.engine.links[0].is_draining)
        late = max(REQUESTS) + 1
        frontend.add([late], [1, 2, 3], 20)
        one.go.set()
        await until(one.ended.is_set)
        assert one.error is None, "its stream ends in peace"
        assert deployed.engine.totals.replicas_lost == 0
        assert deployed.engine.totals.requests_requeued == 0
        two.go.set()
        await frontend.until_finished(*REQUESTS, late)
        assert frontend.tokens.pop(late) == list(range(3, 23))
        assert_whole(frontend)


async def test_what_a_draining_worker_has_at_its_deadline_goes_on_elsewhere(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        one, two, frontend = await two_at_work(deployed)
        one.say(draining=types_pb2.Draining(deadline_ms=50))
        await until(one.ended.is_set)
        assert one.error is None
        assert deployed.engine.totals.requests_requeued > 0
        two.go.set()
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)


async def test_a_drain_without_time_requeues_at_once_and_the_last_worker_to_drain_leaves_nobody_ready(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        add_all(frontend)
        await until(lambda: worker.num_held)
        worker.say(draining=types_pb2.Draining())
        await until(worker.ended.is_set)
        assert not deployed.engine.is_ready
        await deployed.worker("heir")
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)


async def test_a_request_that_another_scheduler_lost_goes_on_from_its_tokens(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        had = [
            engine_pb2.ResumeState(output_token_ids=pack_i32([3, 4, 5]), cached_tokens_reported=True, timing_reported=True),
            engine_pb2.ResumeState(done=True),
        ]
        frontend.add([1, 2], [1, 2, 3], 8, resume=had)
        frontend.add([3], [1, 2, 3], 8, resume=had)
        frontend.add([4], [1, 2, 3], 8, resume=[engine_pb2.ResumeState(output_token_ids=pack_i32([5000]))])
        await frontend.until_finished(1, 2, 3, 4)
        assert frontend.tokens[1] == [6, 7, 8, 9, 10], "what was delivered counts, and is not said again"
        assert 1 not in frontend.cached
        assert not frontend.tokens[2]
        assert {handle: error.kind for handle, error in frontend.errors.items()} == dict.fromkeys(
            (3, 4), types_pb2.ERROR_KIND_INVALID_ARGUMENT
        )


async def test_a_result_in_parts_is_one_result(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.in_parts = True
        add_all(frontend)
        await frontend.until_finished(*REQUESTS)
        assert_whole(frontend)


async def test_steps_carry_a_forecast_once_there_is_one(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        frontend.add([1], [1], 20)  # steps of one token each, so that the first says what the others take
        await frontend.until_finished(1)
        assert worker.forecasts_us[0] == 0
        assert max(worker.forecasts_us) > 0
