"""Lists of peers in which one entry may stand for several: `dns:NAME:PORT` is every address that the name resolves to.

Whoever has peers gives the list as it was configured and is told the addresses behind it whenever they change. A look-up that fails keeps
what the name last gave: a name server's fault takes no peer away. Who is dialled, and when a peer that is no longer listed is let go, is
for the owner of the connections.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trivet_proto.errors import invalid

from trivet_chassis.addresses import Address, parse_address

logger = logging.getLogger(__name__)

SCHEME = "dns:"
RESOLVE_INTERVAL_S = 5.0
LOOKUP_TIMEOUT_S = 5.0

Lookup: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a name, in any order; raises OSError when they cannot be had."""


@dataclass(frozen=True, slots=True)
class PeerName:
    """A name whose every address is a peer of its own."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}:{self.port}"


def parse_peer(text: str, name: str = "address") -> Address | PeerName:
    """Raises INVALID_ARGUMENT with what would have been right."""
    if not text.startswith(SCHEME):
        return parse_address(text, name)
    address = parse_address(text.removeprefix(SCHEME), name)
    if address.is_unix or _is_ip(address.host):
        raise invalid(f"{name}: {text!r}: {SCHEME} takes the name of hosts and a port, as in {SCHEME}scheduler:7100", name)
    return PeerName(address.host, address.port)


async def look_up(name: str) -> Sequence[str]:
    """The A and AAAA records of `name`, as this machine's resolver gives them."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(place[0]) for _, _, _, _, place in found]


class Peers:
    """The addresses behind a configured list, in the list's order, those of one name sorted."""

    def __init__(
        self, entries: Sequence[str], *, name: str = "address", lookup: Lookup = look_up, interval_s: float = RESOLVE_INTERVAL_S
    ) -> None:
        """`name` is the setting's, for messages. Raises INVALID_ARGUMENT for an entry that is malformed."""
        self._entries = [parse_peer(entry, name) for entry in entries]
        self._lookup = lookup
        self._interval_s = interval_s
        self._found: dict[PeerName, tuple[str, ...]] = {}
        self._failing: set[PeerName] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is known now: addresses written out, and those that names gave; each once."""
        known: dict[str, None] = {}
        for entry in self._entries:
            known.update(dict.fromkeys(self._found.get(entry, ()) if isinstance(entry, PeerName) else (str(entry),)))
        return tuple(known)

    @property
    def are_fixed(self) -> bool:
        """Whether no entry is a name, so that nothing ever changes."""
        return not any(isinstance(entry, PeerName) for entry in self._entries)

    async def resolve(self) -> tuple[str, ...]:
        """Look every name up once, side by side; returns what is known then."""
        names = dict.fromkeys(entry for entry in self._entries if isinstance(entry, PeerName))
        await asyncio.gather(*(self._resolve(name) for name in names))
        return self.addresses

    async def follow(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Look the names up every few seconds and tell of changes, first of what there is; runs until cancelled."""
        told: tuple[str, ...] | None = None
        while True:
            addresses = await self.resolve()
            if addresses != told:
                told = addresses
                on_change(addresses)
            await asyncio.sleep(self._interval_s)

    async def _resolve(self, peer: PeerName) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await self._lookup(peer.name)
        except (OSError, TimeoutError, UnicodeError) as error:
            if peer not in self._failing:
                logger.warning("%s cannot be looked up, its last addresses stay: %s", peer, error or "no answer in time")
            self._failing.add(peer)
            return
        if peer in self._failing:
            self._failing.remove(peer)
            logger.info("%s can be looked up again", peer)
        self._found[peer] = tuple(sorted({str(Address(host=host, port=peer.port)) for host in found}))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
