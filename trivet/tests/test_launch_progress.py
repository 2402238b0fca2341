"""What a terminal shows while services start."""

import io
import logging

import pytest
from rich.console import Console
from rich.text import Text
from trivet.launch.progress import PlainProgress, TerminalProgress
from trivet_chassis.announcing import SETTINGS_MARK
from trivet_chassis.clock import ManualClock
from trivet_chassis.logging import TextFormatter


def log_line(service: str, message: str) -> bytes:
    record = logging.LogRecord("trivet_worker.loader", logging.INFO, "loader.py", 1, message, None, None)
    return TextFormatter(service).format(record).encode() + b"\n"


def test_the_last_log_message_of_a_service_is_its_activity() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    clock = ManualClock()
    progress = TerminalProgress(console, clock)
    progress.begin()
    progress.starting("worker")
    progress.log("worker", log_line("worker", "loading weights: 12 of 30 layers"))
    clock.advance(4)
    shown = Text().join(progress.rows())
    progress.end()
    assert shown.plain.endswith(" worker     loading weights: 12 of 30 layers  4 s")


def test_a_services_settings_are_logged_but_are_no_activity() -> None:
    shown_on = io.StringIO()
    progress = TerminalProgress(Console(file=shown_on, force_terminal=True, width=100), ManualClock())
    progress.begin()
    progress.starting("worker-0")
    progress.log("worker-0", log_line("worker-0", f"{SETTINGS_MARK} threads = 2 [flag --threads]"))
    shown = Text().join(progress.rows())
    progress.end()
    assert shown.plain.endswith(" worker-0   starting  0 s")
    assert "threads = 2" in shown_on.getvalue()


def test_a_process_is_called_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for progress in (PlainProgress(io.BytesIO(), ManualClock()), TerminalProgress(Console(file=io.StringIO()), ManualClock())):
        progress.starting("worker-0")
        progress.ready("worker-0")
    assert [record.getMessage() for record in caplog.records] == [
        "starting worker-0",
        "worker-0 is ready after 0.0 s",
        "starting worker-0",
        "worker-0 is ready",
    ]


def test_plain_output_passes_logs_on_byte_by_byte() -> None:
    stream = io.BytesIO()
    progress = PlainProgress(stream)
    progress.log("worker", b'{"message": "\xff"}\n')
    assert stream.getvalue() == b'{"message": "\xff"}\n'


def test_a_reader_that_left_stops_nobody() -> None:
    class Closed(io.BytesIO):
        def write(self, line: object) -> int:
            raise BrokenPipeError

    progress = PlainProgress(Closed())
    for _ in range(2):
        progress.log("worker", b"still here\n")
