"""Sleep: workers give back the memory of their KV cache, or of their weights too, and keep their processes.

What ran goes back to the queue with the tokens it has and goes on after the waking; so does what still comes in, though a scheduler whose
workers sleep is not ready, and frontends send nothing new there. A worker that attaches meanwhile is put to sleep as well. The engine owns
the links; this owns how deep they sleep.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.v1 import worker_pb2

AWAKE = 0
LEVELS = (1, 2)  # without the KV cache; without the weights too


class Sleeper(Protocol):
    """A worker, as it is put to sleep."""

    name: str

    async def control(self, control: worker_pb2.Control) -> None: ...


class Sleep:
    """`still` freezes all replicas and returns when no step is unanswered; `go_on` lifts that."""

    def __init__(
        self, sleepers: Callable[[], Sequence[Sleeper]], *, still: Callable[[], Awaitable[None]], go_on: Callable[[], None]
    ) -> None:
        self.level = AWAKE
        self._sleepers = sleepers
        self._still = still
        self._go_on = go_on
        self._one_at_a_time = asyncio.Lock()
        self._late: set[asyncio.Task[None]] = set()

    async def begin(self, level: int) -> None:
        """Return when all workers sleep. Raises INVALID_ARGUMENT for an unknown level, and what a worker refuses with: all wake again."""
        if level not in LEVELS:
            raise invalid(f"level: {level} is none; 1 drops the KV cache, 2 the weights too", "level")
        async with self._one_at_a_time:
            if self.level == level:
                return
            if self.level != AWAKE:
                raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"the workers sleep at level {self.level}; wake them first")
            await self._still()
            self.level = level
            try:
                await self._tell(_sleep_message(level))
            except TrivetError:
                await self._wake_up()
                raise

    async def end(self) -> None:
        """Return when all workers are awake and what waited goes on."""
        async with self._one_at_a_time:
            if self.level != AWAKE:
                await self._wake_up()

    def take_late(self, sleeper: Sleeper) -> None:
        """One that has attached just now does as the others do."""
        if self.level == AWAKE:
            return
        task = asyncio.create_task(self._follow(sleeper), name=f"put {sleeper.name} to sleep")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _follow(self, sleeper: Sleeper) -> None:
        async with self._one_at_a_time:
            if self.level != AWAKE:
                await _heard(sleeper, _sleep_message(self.level))

    async def _wake_up(self) -> None:
        await asyncio.gather(*(_heard(sleeper, worker_pb2.Control(wake_up=worker_pb2.ControlWakeUp())) for sleeper in self._sleepers()))
        self.level = AWAKE
        self._go_on()

    async def _tell(self, control: worker_pb2.Control) -> None:
        failures = await asyncio.gather(*(sleeper.control(control) for sleeper in self._sleepers()), return_exceptions=True)
        for failure in failures:
            if isinstance(failure, TrivetError) and failure.kind is ErrorKind.UNAVAILABLE:
                continue  # it is lost, which is nobody's fault here: what it held is free
            if failure is not None:
                raise failure


def _sleep_message(level: int) -> worker_pb2.Control:
    return worker_pb2.Control(sleep=worker_pb2.ControlSleep(level=level))


async def _heard(sleeper: Sleeper, control: worker_pb2.Control) -> None:
    """A worker that cannot do it ends its own stream and comes again, awake."""
    try:
        await sleeper.control(control)
    except TrivetError:
        return
