"""Names that stand for several peers: what they resolve to, when that changes, and what a failing name server does."""

import asyncio
import socket
from collections.abc import Sequence

import pytest
from trivet_chassis.resolving import PeerName, Peers, look_up, parse_peer
from trivet_proto.errors import ErrorKind, TrivetError


class Zone:
    """A name server of this process."""

    def __init__(self, **names: list[str]) -> None:
        self.names = names
        self.fault: OSError | None = None
        self.failed = asyncio.Event()

    async def look_up(self, name: str) -> Sequence[str]:
        if self.fault is not None:
            self.failed.set()
            raise self.fault
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.names[name]


async def test_every_address_of_a_name_is_a_peer_beside_those_written_out() -> None:
    zone = Zone(scheduler=["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"])
    peers = Peers(["unix:/run/one.sock", "dns:scheduler:7100", "10.0.0.1:7100"], lookup=zone.look_up)
    assert peers.addresses == ("unix:/run/one.sock", "10.0.0.1:7100")
    assert not peers.are_fixed
    assert await peers.resolve() == ("unix:/run/one.sock", "10.0.0.1:7100", "10.0.0.2:7100", "[fd00::1]:7100")


async def test_changes_are_told_and_nothing_else() -> None:
    zone = Zone(scheduler=["10.0.0.1"])
    told: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    peers = Peers(["dns:scheduler:7100"], lookup=zone.look_up, interval_s=0.01)
    following = asyncio.create_task(peers.follow(told.put_nowait))
    async with asyncio.timeout(5):
        assert await told.get() == ("10.0.0.1:7100",)
        zone.fault = socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        await zone.failed.wait()
        zone.fault = None
        zone.names["scheduler"] = ["10.0.0.2", "10.0.0.1"]
        assert await told.get() == ("10.0.0.1:7100", "10.0.0.2:7100")
        zone.names["scheduler"] = ["10.0.0.2"]
        assert await told.get() == ("10.0.0.2:7100",)
    assert told.empty()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_look_up_that_fails_is_logged_once_and_keeps_the_last_addresses(caplog: pytest.LogCaptureFixture) -> None:
    zone = Zone(scheduler=["10.0.0.1"])
    peers = Peers(["dns:scheduler:7100"], lookup=zone.look_up)
    await peers.resolve()
    del zone.names["scheduler"]
    for _ in range(3):
        assert await peers.resolve() == ("10.0.0.1:7100",)
    assert caplog.text.count("dns:scheduler:7100 cannot be looked up") == 1


async def test_a_list_without_names_is_fixed() -> None:
    peers = Peers(["127.0.0.1:7100"])
    assert peers.are_fixed
    assert await peers.resolve() == ("127.0.0.1:7100",)


async def test_this_machine_resolves_localhost() -> None:
    assert "127.0.0.1" in await look_up("localhost")


def test_a_peer_is_an_address_or_a_name_with_a_port() -> None:
    assert parse_peer("dns:scheduler.trivet.svc:7100") == PeerName("scheduler.trivet.svc", 7100)
    assert str(parse_peer("dns:scheduler:7100")) == "dns:scheduler:7100"
    assert str(parse_peer("scheduler:7100")) == "scheduler:7100"


@pytest.mark.parametrize("text", ["dns:scheduler", "dns:", "dns:10.0.0.1:7100", "dns:[::1]:7100", "dns:unix:/x", "dns:a b:1"])
def test_what_is_no_peer_is_refused_by_the_setting(text: str) -> None:
    with pytest.raises(TrivetError, match="scheduler: ") as caught:
        parse_peer(text, "scheduler")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "scheduler")
