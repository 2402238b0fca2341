"""Requests without any worker: they wait for one to come back, but not for ever."""

import pytest
from model_worker import make_replica, make_spec
from trivet_chassis.clock import ManualClock
from trivet_proto.errors import ErrorKind
from trivet_proto.v1 import types_pb2
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.plan import Delta
from trivet_scheduler.request import Request

LIMIT_S = 30.0


class Link:
    """As much of an attached worker as the engine asks for here."""

    def __init__(self) -> None:
        self.replica = make_replica()
        self.name, self.card, self.is_draining = "replica", types_pb2.ModelCard(), False

    def send_step(self, plan: object) -> None:
        """Takes steps and answers none."""


class Owner:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def take_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def take_model(self, card: types_pb2.ModelCard) -> None:
        """Nothing is made of it."""

    def take_readiness(self) -> None:
        """Nothing is made of it."""


@pytest.fixture
async def engine() -> Engine:
    return Engine(SchedulerSettings(replica_timeout=LIMIT_S), ManualClock())


def ask(engine: Engine, owner: Owner) -> Request:
    (request,) = engine.core.add(make_spec([1, 2, 3], 8), owner, [1], 7, 100)
    return request


def pass_time(engine: Engine, seconds: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(seconds)
    engine.give_up_waiting()


async def test_a_request_whose_worker_does_not_come_back_ends_with_a_retryable_error(engine: Engine) -> None:
    link, owner = Link(), Owner()
    engine.attach(link)  # type: ignore[arg-type]
    request = ask(engine, owner)
    engine.core.schedule(link.replica)
    pass_time(engine, 10 * LIMIT_S)
    assert not request.status.is_finished  # a long step is the watchdog's matter
    engine.detach(link, "it was killed")  # type: ignore[arg-type]
    pass_time(engine, LIMIT_S - 1)
    assert not request.status.is_finished
    pass_time(engine, 1)
    assert request.error is not None
    assert request.error.kind is ErrorKind.UNAVAILABLE
    assert request.error.retryable


async def test_a_worker_that_comes_back_in_time_saves_the_request(engine: Engine) -> None:
    link, owner = Link(), Owner()
    engine.attach(link)  # type: ignore[arg-type]
    request = ask(engine, owner)
    engine.detach(link, "it was killed")  # type: ignore[arg-type]
    pass_time(engine, LIMIT_S - 1)
    engine.attach(Link())  # type: ignore[arg-type]
    pass_time(engine, LIMIT_S)
    assert not request.status.is_finished


async def test_a_request_that_came_later_has_its_own_time(engine: Engine) -> None:
    first = ask(engine, Owner())
    pass_time(engine, LIMIT_S - 1)
    second = ask(engine, Owner())
    pass_time(engine, 1)
    assert first.status.is_finished
    assert not second.status.is_finished
