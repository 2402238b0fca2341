"""The life of a launch: start all, wait until each is healthy, keep them running, stop them in order.

Owns the child processes. Before all are ready, a child that exits ends the launch, for a mistake is likelier than an accident; afterwards
it is restarted as the policy allows, or left dead while the others go on where restarts are off. A stop drains: the frontend first, since
its requests need the others; where signals are obeyed, SIGINT, SIGTERM and SIGHUP stop, and a second one kills. Whatever happens here, no
child outlives `run`.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from trivet_chassis.lifecycle import EXIT_CLEAN, EXIT_CONFIGURATION, EXIT_FAULT
from trivet_chassis.rpc import is_serving

from trivet.launch.child import Child, describe_exit
from trivet.launch.guard import Guard
from trivet.launch.plan import ProcessPlan
from trivet.launch.progress import Progress
from trivet.launch.restarts import RestartPolicy

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 0.1
END_WITHIN_S = 5.0
"""What children may take to leave when there is nothing to drain."""

SHOWN_LINES = 15
CONFIGURATION_MARK = "configuration: "
"""How the chassis begins the one line of a configuration error."""


class LaunchFailed(Exception):
    """The deployment can't go on; the message is for people."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Supervisor:
    """Runs `plans`, given in the order of starting; `when_ready` is called once, when all are healthy for the first time."""

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        *,
        guard: Guard,
        progress: Progress,
        policy: RestartPolicy,
        startup_timeout_s: float,
        when_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._plans = plans
        self._guard = guard
        self._progress = progress
        self._policy = policy
        self._startup_timeout_s = startup_timeout_s
        self._when_ready = when_ready
        self._children: dict[str, Child] = {}
        self._is_up = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._second_signal = 0

    async def run(self) -> int:
        """Until told to stop. Returns the exit code. Raises `LaunchFailed` after all children are gone."""
        work = asyncio.create_task(self._serve(), name="serving")
        stop = asyncio.create_task(self._stop.wait(), name="stop asked")
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed = work.done()
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            self._progress.end()
            await (self._drain() if self._is_up and not failed else self._end())
        if failed:
            work.result()
        return 128 + self._second_signal if self._second_signal else EXIT_CLEAN

    # ---- running ----

    async def _serve(self) -> None:
        """Ends only by an exception."""
        self._progress.begin()
        first_ready = [asyncio.Event() for _ in self._plans]
        services = [self._look_after(plan, event) for plan, event in zip(self._plans, first_ready, strict=True)]
        await _until_one_fails(self._announce(first_ready), *services)
        raise LaunchFailed("no service is left, and restarts are off (--max-restarts 0)", EXIT_FAULT)

    async def _announce(self, first_ready: Sequence[asyncio.Event]) -> None:
        for event in first_ready:
            await event.wait()
        self._is_up = True
        self._progress.end()
        await self._when_ready()

    async def _look_after(self, plan: ProcessPlan, first_ready: asyncio.Event) -> None:
        """One service, for as long as the launch lives, or until it died and restarts are off."""
        while True:
            child = self._start(plan)
            if await self._becomes_ready(child):
                self._progress.ready(plan.name)
                first_ready.set()
            code = await asyncio.shield(child.exited)
            pause = self._pause_after_death(child, code)
            if pause is None:
                return
            await asyncio.sleep(pause)

    def _start(self, plan: ProcessPlan) -> Child:
        self._progress.starting(plan.name)
        child = Child(plan, guard=self._guard, sink=lambda line: self._progress.log(plan.name, line))
        self._children[plan.name] = child
        return child

    async def _becomes_ready(self, child: Child) -> bool:
        """True once healthy; False when it exited first. Raises `LaunchFailed` when it takes too long."""
        healthy = asyncio.create_task(_until_serving(child.plan))
        try:
            await asyncio.wait({healthy, child.exited}, timeout=self._startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not healthy.done() and child.is_alive:
                reason = f"{child.plan.name} isn't ready after {self._startup_timeout_s:g} s"
                raise LaunchFailed(reason + _last_lines(child), EXIT_FAULT)
            return child.is_alive and healthy.result()
        finally:
            healthy.cancel()
            await asyncio.gather(healthy, return_exceptions=True)

    def _pause_after_death(self, child: Child, code: int) -> float | None:
        """Seconds until the restart, None where restarts are off. Raises `LaunchFailed` where all have to go."""
        name = child.plan.name
        if code == EXIT_CONFIGURATION:
            raise LaunchFailed(f"{name} refuses its configuration: {_refusal(child)}", EXIT_CONFIGURATION)
        if not self._is_up:
            raise LaunchFailed(f"{name} ended while starting ({describe_exit(code)}){_last_lines(child)}", EXIT_FAULT)
        if self._policy.is_off:
            logger.error("%s died (%s); it stays so (--max-restarts 0), the others go on", name, describe_exit(code))
            return None
        pause = self._policy.pause_after_death()
        if pause is None:
            raise LaunchFailed(f"{name} died ({describe_exit(code)}), once too often to go on{_last_lines(child)}", EXIT_FAULT)
        logger.error("%s died (%s); it is restarted in %.2g s", name, describe_exit(code), pause)
        return pause

    # ---- stopping ----

    def obey_signals(self) -> None:
        """For a launcher that is a process of its own: from now on signals stop it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the terminal may go
            loop.add_signal_handler(number, self._on_signal, number)

    def stop(self) -> None:
        """Let running requests finish, and end all."""
        self._stop.set()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._second_signal = number
            self._hurry.set()
            return
        logger.info("%s: stopping; running requests may finish, a second signal stops at once", signal.Signals(number).name)
        self.stop()

    async def _drain(self) -> None:
        """Last started first: each has gone before the next is asked, so that running requests find what they need."""
        for plan in reversed(self._plans):
            child = self._children[plan.name]
            child.terminate()
            await self._until_gone(child, plan.stop_within_s)

    async def _end(self) -> None:
        """All at once: nothing runs that could finish."""
        children = [self._children[plan.name] for plan in reversed(self._plans) if plan.name in self._children]
        for child in children:
            child.terminate()
        for child in children:
            await self._until_gone(child, END_WITHIN_S)

    async def _until_gone(self, child: Child, within_s: float) -> None:
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({child.exited, hurry}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if child.is_alive:
            if not self._hurry.is_set():
                logger.warning("%s hasn't left within %g s; it is killed", child.plan.name, within_s)
            child.kill()
        hurry.cancel()
        await asyncio.gather(hurry, return_exceptions=True)
        await child.exited


async def _until_serving(plan: ProcessPlan) -> bool:
    while not await is_serving(plan.health, service=plan.health_name):
        await asyncio.sleep(HEALTH_EVERY_S)
    return True


async def _until_one_fails(*work: Coroutine[Any, Any, None]) -> None:
    """Run all side by side; the first exception ends the others and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refusal(child: Child) -> str:
    lines = child.log.last_lines(SHOWN_LINES)
    marked = [line.removeprefix(CONFIGURATION_MARK) for line in lines if line.startswith(CONFIGURATION_MARK)]
    return marked[-1] if marked else lines[-1] if lines else "it doesn't say why"


def _last_lines(child: Child) -> str:
    lines = child.log.last_lines(SHOWN_LINES)
    return "; its last lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else "; it has written nothing"
