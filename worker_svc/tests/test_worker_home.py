"""Where a worker makes its home, and when it leaves it."""

from collections.abc import Sequence

import pytest
from trivet_chassis.clock import ManualClock
from trivet_chassis.resolving import Peers
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_worker.link.home import Home

A, B, C = "a:1", "b:1", "c:1"


class Schedulers:
    """Replicas by address; who is not there doesn't answer."""

    def __init__(self, **replicas: int) -> None:
        self.replicas = {f"{name}:1": count for name, count in replicas.items()}
        self.asked = 0
        self.clock = ManualClock()

    async def ask(self, address: str) -> int | None:
        self.asked += 1
        return self.replicas.get(address)

    def home(self, *addresses: str) -> Home:
        return Home(Peers(addresses), self.clock, 30.0, ask=self.ask)


async def test_one_address_is_never_asked() -> None:
    schedulers = Schedulers()
    assert await schedulers.home(A).choose() == A
    assert schedulers.asked == 0


async def test_home_is_where_there_are_fewest_replicas() -> None:
    assert await Schedulers(a=2, b=1, c=3).home(A, B, C).choose() == B


async def test_chance_decides_between_equals() -> None:
    schedulers = Schedulers(a=0, b=0)
    assert {await schedulers.home(A, B).choose() for _ in range(64)} == {A, B}


async def test_who_does_not_answer_is_not_chosen() -> None:
    assert await Schedulers(b=9).home(A, B).choose() == B


async def test_without_an_answer_any_is_tried() -> None:
    schedulers = Schedulers()
    assert {await schedulers.home(A, B).choose() for _ in range(64)} == {A, B}


async def test_a_lost_home_is_dialled_again_for_a_while_and_then_another() -> None:
    schedulers = Schedulers(a=0, b=5)
    home = schedulers.home(A, B)
    home.reached(await home.choose())
    del schedulers.replicas[A]
    for _ in range(3):
        home.lost(A)
        assert await home.choose() == A
        schedulers.clock.advance(9.9)
    home.lost(A)
    schedulers.clock.advance(0.4)
    assert await home.choose() == B
    home.reached(B)
    schedulers.replicas[A] = 0
    home.lost(B)
    assert await home.choose() == B  # its home is there now


async def test_a_home_that_is_back_is_kept() -> None:
    schedulers = Schedulers(a=0, b=0)
    home = schedulers.home(A, B)
    home.reached(A)
    for _ in range(4):
        home.lost(A)
        schedulers.clock.advance(20)
        home.reached(A)
        assert await home.choose() == A


async def test_without_another_that_answers_home_is_dialled_on() -> None:
    schedulers = Schedulers()
    home = schedulers.home(A, B)
    home.reached(A)
    home.lost(A)
    schedulers.clock.advance(100)
    assert await home.choose() == A


async def test_a_home_that_leaves_is_left_at_once() -> None:
    schedulers = Schedulers(a=0, b=7)
    home = schedulers.home(A, B)
    home.reached(A)
    home.lost(A, for_good=True)
    assert await home.choose() == B


async def test_who_refused_is_the_last_choice() -> None:
    schedulers = Schedulers(a=0, b=1)
    home = schedulers.home(A, B)
    assert await home.choose() == A
    home.lost(A)
    assert await home.choose() == B


async def test_a_home_that_its_name_no_longer_gives_is_left() -> None:
    found: Sequence[str] = ("10.0.0.1", "10.0.0.2")

    async def lookup(name: str) -> Sequence[str]:
        return found

    async def ask(address: str) -> int | None:
        return 0

    home = Home(Peers(["dns:scheduler:7100"], lookup=lookup), ManualClock(), 30.0, ask=ask)
    home.reached("10.0.0.1:7100")
    assert await home.choose() == "10.0.0.1:7100"
    home.lost("10.0.0.1:7100")
    found = ("10.0.0.2",)
    assert await home.choose() == "10.0.0.2:7100"


async def test_a_name_that_gives_nothing_is_an_error_that_passes() -> None:
    async def lookup(name: str) -> Sequence[str]:
        raise OSError("no such name")

    home = Home(Peers(["dns:scheduler:7100"], lookup=lookup), ManualClock(), 30.0)
    with pytest.raises(TrivetError, match="give no address") as failed:
        await home.choose()
    assert failed.value.kind is ErrorKind.UNAVAILABLE
