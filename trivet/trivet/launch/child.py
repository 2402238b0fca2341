"""One child process: started in a session of its own, waited for, told to stop. Decides nothing; the supervisor does.

A session of its own keeps a terminal's Ctrl-C away from the child, and makes it the leader of a process group that can be ended as a whole.
"""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress

from trivet.launch.child_log import ChildLog, Sink
from trivet.launch.guard import Guard
from trivet.launch.own_thread import in_own_thread
from trivet.launch.plan import ProcessPlan


class Child:
    """A running process of `plan`; `exited` is done when it and its group are gone."""

    def __init__(self, plan: ProcessPlan, *, guard: Guard, sink: Sink) -> None:
        self.plan = plan
        self.log = ChildLog(sink)
        self._guard = guard
        try:
            self._process = subprocess.Popen(
                plan.command,
                env=dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=self.log.write_end,
                stderr=self.log.write_end,
                start_new_session=True,
            )
        finally:
            self.log.child_has_it()
        guard.watch(self.pid)
        self.exited: asyncio.Task[int] = asyncio.create_task(self._until_exited(), name=f"exit of {plan.name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.exited.done()

    def terminate(self) -> None:
        """Ask the process to drain and leave; what it has started is its own business."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all that it has started, now."""
        if self.is_alive:
            os.killpg(self.pid, signal.SIGKILL)

    async def _until_exited(self) -> int:
        # Without reaping: as long as the zombie is there, its process id and its group's can't be anybody else's.
        await in_own_thread(lambda: os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT), name=f"wait for {self.plan.name}")
        with suppress(ProcessLookupError, PermissionError):  # where it has left nothing behind
            os.killpg(self.pid, signal.SIGKILL)
        self._guard.forget(self.pid)
        code = self._process.wait()
        self.log.finish()
        return code


def describe_exit(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", perhaps for want of memory" if -code == signal.SIGKILL else "")
