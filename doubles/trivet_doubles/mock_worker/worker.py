"""The mock worker's life in a process: dial, serve, dial again, until it is told to leave or dies on cue.

As an async context manager it runs beside a test; as a service it is run by `server.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from trivet_chassis.clock import Clock, SystemClock
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_doubles.mock_worker.attachment import Attachment, DiedError
from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.faults import Faults
from trivet_doubles.mock_worker.identity import identity_of
from trivet_doubles.mock_worker.life import Life
from trivet_doubles.model import DoubleModel, load_double_model
from trivet_doubles.tokens import TokenLaw

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0

FOR_GOOD = frozenset({ErrorKind.FAILED_PRECONDITION, ErrorKind.ALREADY_EXISTS})
"""What a scheduler ends a stream with when dialling again cannot help: another model, a name that another process has taken."""


class MockWorker:
    """One replica without a model. `on_death` is called when `die_step` comes; by default it leaves its stream without a word."""

    def __init__(
        self,
        settings: MockWorkerSettings,
        faults: Faults | None = None,
        *,
        model: DoubleModel | None = None,
        clock: Clock | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises INVALID_ARGUMENT for settings that cannot work. `faults`, where given, replace those of the settings."""
        self._settings = settings
        self._on_death = on_death
        model = model or load_double_model(settings.model, is_synthetic=settings.synthetic)
        self._identity = identity_of(settings, model)
        self.life = Life(settings, settings.faults if faults is None else faults, clock or SystemClock())
        self._attachment: Attachment | None = None
        self._is_leaving = False
        self._task: asyncio.Task[None] | None = None
        self.died = asyncio.Event()

    @property
    def law(self) -> TokenLaw:
        """What its tokens follow: `expected_output(..., law.choices)` says them beforehand."""
        return self._identity.law

    async def run(self) -> None:
        """Attach, again and again, until drained or dead.

        Raises FAILED_PRECONDITION when this worker cannot serve there, ALREADY_EXISTS when another has taken its name.
        """
        backoff = FIRST_BACKOFF_S
        while not self._is_leaving:
            attachments = self.life.attachments
            self._attachment = Attachment(self._identity, self.life)
            try:
                await self._attachment.live(self._settings.scheduler)
            except DiedError:
                logger.warning("dying on cue at step %d", self.life.steps)
                self.died.set()
                self._on_death()
                return
            except TrivetError as error:
                if error.kind in FOR_GOOD and not self._is_leaving:
                    raise
                if self.life.attachments > attachments:
                    backoff = FIRST_BACKOFF_S
                if backoff == FIRST_BACKOFF_S and not self._is_leaving:
                    logger.warning("the scheduler at %s: %s; dialling again", self._settings.scheduler, error.message)
            finally:
                self._attachment = None
            if not self._is_leaving:
                await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    def drain(self, deadline_ms: int = 0) -> None:
        """Tell the scheduler, answer what still comes, and do not dial again once the stream has ended."""
        self._is_leaving = True
        if self._attachment is not None:
            self._attachment.drain(deadline_ms)

    async def until_attached(self, within_s: float = 10.0) -> None:
        """Wait until the scheduler has configured it. Raises what `run` ended with, or TimeoutError."""
        async with asyncio.timeout(within_s):
            while not self.life.is_attached:
                if self._task is not None and self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name=f"mock worker {self._settings.replica_name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave without a word, as a process that is killed does."""
        assert self._task is not None, "it was entered"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TrivetError):
            await self._task
