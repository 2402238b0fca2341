"""What outlives an attachment of the mock worker: the count of its steps, the faults to come, who wants to know of it."""

from collections.abc import Callable

from trivet_chassis.clock import Clock
from trivet_proto.v1 import worker_pb2

from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.faults import Faults
from trivet_doubles.mock_worker.stepping import MockRunner


class Life:
    """One per mock worker; `faults` may be exchanged at any time."""

    def __init__(self, settings: MockWorkerSettings, faults: Faults, clock: Clock) -> None:
        self.settings = settings
        self.faults = faults
        self.clock = clock
        self.steps = 0
        self.attachments = 0
        self.num_held = 0  # steps received and not answered
        self._last_answer_at = clock.monotonic()
        self.runner: MockRunner | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.observe: Callable[[worker_pb2.StepResult], None] = lambda result: None
        self._wrong_slots = 0  # of epochs that are over

    @property
    def is_attached(self) -> bool:
        return self.runner is not None

    @property
    def wrong_slots(self) -> int:
        """Slots that did not hold what a request needed, over the whole life; 0 under a scheduler that is right."""
        return self._wrong_slots + (0 if self.runner is None else self.runner.wrong_slots)

    def next_step(self) -> int:
        """The ordinal of the step that is to run now, from 1; each iteration of one counts."""
        self.steps += 1
        return self.steps

    def attached(self, runner: MockRunner | None) -> None:
        """A new epoch has begun, or (None) the attachment is over."""
        if self.runner is not None:
            self._wrong_slots += self.runner.wrong_slots
        changed = (runner is None) != (self.runner is None)
        self.num_held = 0
        self.runner = runner
        self.attachments += runner is not None
        if changed:
            self.on_change()

    def received(self) -> None:
        """A step came; until it is answered the worker is busy."""
        if not self.num_held:
            self._last_answer_at = self.clock.monotonic()
        self.num_held += 1

    def answered(self, result: worker_pb2.StepResult) -> None:
        self._last_answer_at = self.clock.monotonic()
        self.num_held -= result.last_iteration
        self.observe(result)

    def progress(self) -> tuple[bool, float | None]:
        """Whether there is work, and how long it has been, in seconds, since there was an answer."""
        return self.num_held > 0, self.clock.monotonic() - self._last_answer_at
