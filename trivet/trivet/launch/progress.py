"""What a person sees of a launch: live rows on a terminal, log lines elsewhere. The services' own logs pass through here.

On a terminal each service has a row with its last log message as its present activity (load, warm-up) and its time. Once all are ready the
rows go and the logs flow as they come.
"""

import logging
import re
import sys
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text
from trivet_chassis.announcing import SETTINGS_MARK
from trivet_chassis.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

_MESSAGE = re.compile(rb"^\d\d:\d\d:\d\d \S+ +\S+ +[\w.]+: (.*)$")
"""The chassis' text format: time, service, level, logger, message."""

LONGEST_ACTIVITY = 60


class Progress(Protocol):
    """Told by the supervisor what happens, in order: `begin`, then `starting` and `ready` of services, then `end`."""

    def begin(self) -> None: ...

    def starting(self, service: str) -> None: ...

    def ready(self, service: str) -> None: ...

    def log(self, service: str, line: bytes) -> None: ...

    def end(self) -> None: ...


def create_progress(*, on_terminal: bool) -> Progress:
    return TerminalProgress(Console(stderr=True)) if on_terminal else PlainProgress(sys.stderr.buffer)


class PlainProgress:
    """Steps are records of the launcher's log."""

    def __init__(self, stream: BinaryIO, clock: Clock | None = None) -> None:
        self._out = _Output(stream)
        self._clock = clock or SystemClock()
        self._started: dict[str, float] = {}

    def begin(self) -> None:
        pass

    def starting(self, service: str) -> None:
        self._started[service] = self._clock.monotonic()
        logger.info("starting %s", service)

    def ready(self, service: str) -> None:
        logger.info("%s is ready after %.1f s", service, self._clock.monotonic() - self._started[service])

    def log(self, service: str, line: bytes) -> None:
        self._out.write(line)

    def end(self) -> None:
        pass


@dataclass(slots=True)
class _Row:
    started: float
    activity: str = "starting"
    took: float | None = None


class TerminalProgress:
    """Live rows while services start; afterwards as plain as the other."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def begin(self) -> None:
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def starting(self, service: str) -> None:
        if self._live is None:
            logger.info("starting %s", service)
            return
        self._rows[service] = _Row(self._clock.monotonic())

    def ready(self, service: str) -> None:
        if self._live is None:
            logger.info("%s is ready", service)
            return
        row = self._rows[service]
        row.took = self._clock.monotonic() - row.started
        self._console.print(Text.assemble(("✓ ", "green"), f"{service:<10} ready after {row.took:.1f} s"))

    def log(self, service: str, line: bytes) -> None:
        row = self._rows.get(service)
        found = _MESSAGE.match(line.rstrip())
        if self._live is not None and row is not None and found is not None:
            message = found.group(1).decode(errors="replace")
            if not message.startswith(SETTINGS_MARK):  # which is nothing that a service does
                row.activity = message[:LONGEST_ACTIVITY]
        self._console.print(Text.from_ansi(line.decode(errors="replace").rstrip("\r\n")), soft_wrap=True, highlight=False)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._rows.clear()

    def rows(self) -> list[Text]:
        """One line for each service that is not ready."""
        now = self._clock.monotonic()
        frame = self._spinner.render(now)
        assert isinstance(frame, Text), "a spinner without a text of its own is its frame"
        return [
            Text.assemble(frame, f" {service:<10} {row.activity}", (f"  {now - row.started:.0f} s", "dim"))
            for service, row in self._rows.items()
            if row.took is None
        ]

    def _render(self) -> RenderableType:
        return Group(*self.rows())


class _Output:
    """Writes to a stream until nobody reads it; a service must not be stopped by a reader that left."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream: BinaryIO | None = stream

    def write(self, line: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError:
            self._stream = None
