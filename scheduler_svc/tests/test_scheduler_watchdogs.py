"""Silence and steps that take too long: who is lost, who is not, and by when."""

from pathlib import Path

import pytest
from deployed import Deployment, deployment
from played import PlayedFrontend, PlayedWorker, until
from trivet_chassis.clock import ManualClock
from trivet_proto.errors import ErrorKind
from trivet_proto.v1 import types_pb2
from trivet_scheduler.awake import AwakeTimer, Pulse
from trivet_scheduler.replicas.step_watch import StepWatch
from trivet_scheduler.report import load_report, step_progress
from trivet_scheduler.step_limits import StepLimits

QUICK = Pulse(beat_s=0.04, silence_s=0.4)


async def stuck(deployed: Deployment) -> tuple[PlayedWorker, PlayedFrontend]:
    """A request whose steps are not answered, though the worker beats."""
    worker, frontend = await deployed.worker(), await deployed.frontend()
    worker.go.clear()
    frontend.add([1], [1, 2, 3], 20)
    await until(lambda: worker.num_held)
    return worker, frontend


# ---- over gRPC ----


async def test_a_silent_worker_is_lost_and_one_that_beats_is_not(tmp_path: Path) -> None:
    async with deployment(tmp_path, QUICK) as deployed:
        silent, beating = await deployed.worker("silent"), await deployed.worker("beating")
        silent.mute = True
        await until(silent.ended.is_set)
        assert silent.error.kind is ErrorKind.ABORTED
        assert "no heartbeat" in silent.error.message
        assert not beating.ended.is_set()
        assert deployed.engine.num_replicas == 1


async def test_a_silent_frontend_loses_its_session_and_what_it_asked_for(tmp_path: Path) -> None:
    async with deployment(tmp_path, QUICK) as deployed:
        _, silent = await stuck(deployed)
        beating = await deployed.frontend("beating")
        silent.mute = True
        await until(silent.ended.is_set)
        assert silent.error.kind is ErrorKind.ABORTED
        assert not beating.ended.is_set()
        assert not deployed.engine.core.requests


async def test_a_worker_whose_step_takes_too_long_is_lost_though_it_beats(tmp_path: Path) -> None:
    async with deployment(tmp_path, QUICK, first_step_timeout=0.3) as deployed:
        worker, frontend = await stuck(deployed)
        await until(worker.ended.is_set)
        assert worker.error.kind is ErrorKind.ABORTED
        assert "its oldest step is unanswered for" in worker.error.message
        await deployed.worker("heir")
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 23))


async def test_a_first_step_is_given_more_time_than_those_with_a_forecast(tmp_path: Path) -> None:
    async with deployment(tmp_path, QUICK, step_timeout=0.2, step_timeout_factor=1.0, first_step_timeout=60.0) as deployed:
        worker, frontend = await stuck(deployed)
        await until(lambda: (load_report(deployed.engine).last_step_age_ms or 0) > 400)
        assert not worker.ended.is_set()
        assert step_progress(deployed.engine) == (True, None), "the age of a first step says nothing"
        worker.most_answers = 2
        worker.go.set()
        await until(worker.ended.is_set)
        assert "its oldest step is unanswered" in worker.error.message
        await deployed.worker("heir")
        await frontend.until_finished(1)


async def test_a_worker_that_announces_other_work_is_waited_for(tmp_path: Path) -> None:
    async with deployment(tmp_path, QUICK, first_step_timeout=0.3) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.activity = types_pb2.ACTIVITY_COMPILE
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        started = deployed.engine.clock.monotonic()
        await until(lambda: deployed.engine.clock.monotonic() > started + 0.9)
        assert not worker.ended.is_set()
        assert step_progress(deployed.engine) == (True, None)
        worker.activity = types_pb2.ACTIVITY_NONE
        await until(worker.ended.is_set)
        assert "its oldest step is unanswered" in worker.error.message


async def test_progress_is_the_age_of_the_oldest_unanswered_step(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        assert step_progress(deployed.engine) == (False, None)
        worker, frontend = await stuck(deployed)
        busy, age = step_progress(deployed.engine)
        assert busy
        assert age is not None
        await until(lambda: (step_progress(deployed.engine)[1] or 0) > age)
        worker.go.set()
        await frontend.until_finished(1)
        await until(lambda: step_progress(deployed.engine) == (False, None))
        assert not load_report(deployed.engine).HasField("last_step_age_ms")


# ---- the clocks by themselves ----


def test_a_process_that_slept_does_not_take_its_peers_for_silent() -> None:
    clock = ManualClock()
    timer = AwakeTimer(clock, tick_s=0.5)
    clock.advance(0.5)
    assert timer.tick() == pytest.approx(0.5)
    clock.advance(3600)
    assert timer.tick() == pytest.approx(1.5), "one long tick counts for two"
    for _ in range(4):
        clock.advance(0.5)
        timer.tick()
    assert timer.tick() == pytest.approx(3.5)
    timer.reset()
    clock.advance(0.2)
    assert timer.tick() == pytest.approx(0.2)


class TestStepWatch:
    """Ticks of a second."""

    def watch(self) -> tuple[StepWatch, ManualClock]:
        clock = ManualClock()
        return StepWatch(StepLimits(floor_s=10, factor=20, first_s=120), clock, tick_s=1.0), clock

    def overdue_after(self, watch: StepWatch, clock: ManualClock) -> int:
        for second in range(1, 1000):
            clock.advance(1)
            if watch.overdue() is not None:
                return second
        return 1000

    def test_limits_are_the_larger_of_floor_and_multiple_of_the_forecast(self) -> None:
        for forecast, limit in ((0.1, 10), (2.0, 40), (None, 120)):
            watch, clock = self.watch()
            watch.sent(forecast)
            assert self.overdue_after(watch, clock) == limit + 1

    def test_without_a_step_nothing_is_overdue(self) -> None:
        watch, clock = self.watch()
        assert self.overdue_after(watch, clock) == 1000
        assert watch.age_s is None

    def test_a_step_counts_from_the_answer_to_the_one_before(self) -> None:
        watch, clock = self.watch()
        watch.sent(0.1)
        watch.sent(0.1)
        clock.advance(9)
        watch.answered()
        assert watch.age_s == 0
        assert self.overdue_after(watch, clock) == 11

    def test_announced_work_stops_the_count_until_it_is_over(self) -> None:
        watch, clock = self.watch()
        watch.sent(0.1)
        watch.heard_activity(types_pb2.ACTIVITY_ADAPTER)
        assert self.overdue_after(watch, clock) == 1000
        watch.heard_activity(types_pb2.ACTIVITY_ADAPTER)
        watch.heard_activity(types_pb2.ACTIVITY_NONE)
        assert self.overdue_after(watch, clock) == 11
