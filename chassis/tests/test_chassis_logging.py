"""Logs: text for people, JSON for machines, a request id on both, and no line that a user could forge."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from trivet_chassis.logging import JsonFormatter, TextFormatter, configure_logging, request_id


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    token = request_id.set("")
    yield
    request_id.reset(token)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    made = io.StringIO()
    # Not sys.stderr itself: pytest puts its own there between set-up and call.
    monkeypatch.setattr("trivet_chassis.logging.sys", SimpleNamespace(stderr=made))
    return made


def entries(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_without_a_terminal_each_line_is_json(stream: io.StringIO) -> None:
    configure_logging("worker")
    logging.getLogger("a.b").info("hello %s", "you\nthere", extra={"tokens": 3, "path": object})
    (entry,) = entries(stream)
    assert entry["message"] == "hello you\nthere"
    assert (entry["service"], entry["level"], entry["logger"], entry["tokens"]) == ("worker", "info", "a.b", 3)
    assert str(entry["time"]).endswith("+00:00")
    assert "request_id" not in entry


def test_on_a_terminal_it_is_text(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    configure_logging("worker")
    logging.getLogger("a.b").warning("hello", extra={"tokens": 3})
    assert stream.getvalue().endswith(" worker    WARNING a.b: hello tokens=3\n")


def test_the_format_can_be_chosen(stream: io.StringIO) -> None:
    configure_logging("worker", format="text")
    logging.getLogger().info("hello")
    assert not stream.getvalue().startswith("{")


def test_the_level_holds(stream: io.StringIO) -> None:
    configure_logging("worker", "warning")
    logging.getLogger().info("no")
    logging.getLogger().warning("yes")
    assert [entry["message"] for entry in entries(stream)] == ["yes"]


def test_configuring_twice_writes_once(stream: io.StringIO) -> None:
    configure_logging("worker")
    configure_logging("worker")
    logging.getLogger().info("once")
    assert len(entries(stream)) == 1


@pytest.mark.parametrize(("format", "wanted"), [("text", "[request r-1]"), ("json", '"request_id":"r-1"')])
def test_the_request_at_hand_is_on_every_record(stream: io.StringIO, format: str, wanted: str) -> None:
    configure_logging("worker", format="text" if format == "text" else "json")
    request_id.set("r-1")
    logging.getLogger().info("hello")
    assert wanted in stream.getvalue()


def test_an_exception_comes_with_its_traceback(stream: io.StringIO) -> None:
    configure_logging("worker")
    try:
        raise RuntimeError("bad")
    except RuntimeError:
        logging.getLogger().exception("failed", stack_info=True)
    (entry,) = entries(stream)
    assert "RuntimeError: bad" in str(entry["exception"])
    assert "Stack" in str(entry["stack"])


def test_warnings_are_logged(stream: io.StringIO) -> None:
    configure_logging("worker")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning(UserWarning("odd"), UserWarning, "f.py", 1)
    assert "odd" in str(entries(stream)[0]["message"])


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("name", logging.INFO, "f.py", 1, message, None, None)
    vars(made).update(extra)
    return made


def test_text_cannot_be_forged_by_what_a_user_sends() -> None:
    line = TextFormatter("worker").format(record("evil\x1b[2J\r\n12:00:00 worker ERROR fake"))
    assert "\x1b" not in line
    assert "\r" not in line
    assert line.splitlines()[1] == "    12:00:00 worker ERROR fake"


def test_an_extra_field_hides_nothing() -> None:
    entry = json.loads(JsonFormatter("worker").format(record("true", level="fake", service="fake")))
    assert (entry["level"], entry["service"], entry["message"]) == ("info", "worker", "true")


@pytest.mark.parametrize("value", ["\ud800", 1 << 80, {(1, 2): 3}, float("nan"), {1: object()}])
def test_what_json_cannot_say_is_still_a_line_of_json(value: object) -> None:
    line = JsonFormatter("worker").format(record("hello", odd=value))
    assert "\n" not in line
    assert json.loads(line)["message"] == "hello"
