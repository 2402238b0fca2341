"""Which scheduler a worker works for: its home, and where to go when that is gone for long.

With one address there is nothing to choose. With several, home is made where there are fewest replicas, chance deciding between equals, so
that workers which start together spread. A home that is lost is dialled again; after a while without it, any other that answers will do.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import grpc
from trivet_chassis.clock import Clock
from trivet_chassis.resolving import Peers
from trivet_chassis.rpc import create_channel
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0

AskReplicas: TypeAlias = Callable[[str], Awaitable[int | None]]
"""How many replicas the scheduler at an address has; None when it doesn't answer."""


async def ask_replicas(address: str) -> int | None:
    """By `GetLoad`."""
    async with create_channel(address) as channel:
        try:
            answer = await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest(), timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return answer.load.replicas_ready


class Home:
    """Told how each dial went, says where the next one goes."""

    def __init__(self, peers: Peers, clock: Clock, rehome_after_s: float, *, ask: AskReplicas = ask_replicas) -> None:
        self._peers = peers
        self._clock = clock
        self._rehome_after_s = rehome_after_s
        self._ask = ask
        self._home: str | None = None
        self._lost_at: float | None = None
        self._failed: str | None = None

    async def choose(self) -> str:
        """The address to dial now. Raises UNAVAILABLE when no name gives one."""
        known = await self._peers.resolve()
        if self._home in known and not self._is_overdue():
            return self._home
        if not known:
            raise TrivetError(ErrorKind.UNAVAILABLE, "the names of the schedulers give no address")
        if len(known) == 1:
            return known[0]
        chosen = await self._fewest_replicas(known)
        if self._home is not None and chosen != self._home:
            logger.warning("the scheduler at %s is gone: trying the one at %s", self._home, chosen)
        return chosen

    def reached(self, address: str) -> None:
        """Attached there: it is home from now on."""
        self._home, self._lost_at, self._failed = address, None, None

    def lost(self, address: str, *, for_good: bool = False) -> None:
        """The stream ended or never came about. `for_good`: it said that it leaves."""
        self._failed = address
        if address == self._home:
            self._lost_at = self._clock.monotonic() if self._lost_at is None else self._lost_at
            if for_good:
                self._home = None

    def _is_overdue(self) -> bool:
        return self._lost_at is not None and self._clock.monotonic() - self._lost_at >= self._rehome_after_s

    async def _fewest_replicas(self, addresses: Sequence[str]) -> str:
        """Of those that answer; who has just failed is the last choice, and so is a home that is overdue."""
        answers = await asyncio.gather(*(self._ask(address) for address in addresses))
        found = {address: replicas for address, replicas in zip(addresses, answers, strict=True) if replicas is not None}
        candidates = [address for address in found if address not in (self._failed, self._home)] or list(found)
        if not candidates:
            return self._home if self._home is not None and self._home in addresses else random.choice(addresses)
        fewest = min(found[address] for address in candidates)
        return random.choice([address for address in candidates if found[address] == fewest])
