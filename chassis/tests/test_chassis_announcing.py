"""The settings in a service's log: all of them for machines, on a terminal what somebody has changed."""

from typing import Annotated

import msgspec
import pytest
from trivet_chassis.announcing import SETTINGS_MARK, announce_settings
from trivet_chassis.logging import configure_logging
from trivet_chassis.settings import Loaded, Setting, load_settings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, Setting(help="where")] = 8000
    host: Annotated[str, Setting(help="who")] = "localhost"
    api_key: Annotated[str, Setting(help="how", secret=True)] = ""


def loaded(*argv: str) -> Loaded[Settings]:
    environ = {"TRIVET_WORKER_API_KEY": "s3cret"} if argv else {}
    return load_settings(Settings, section="worker", prog="w", description="", argv=argv, environ=environ)


def messages(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def test_json_has_every_setting_with_its_origin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    announce_settings(loaded("--port", "9"), "json")
    (message,) = messages(caplog, "INFO")
    assert (
        message
        == f"{SETTINGS_MARK}\nport = 9  [flag --port]\nhost = 'localhost'  [default]\napi_key = (hidden)  [env TRIVET_WORKER_API_KEY]"
    )


def test_a_terminal_shows_one_line_of_what_is_no_default_and_the_rest_to_who_debugs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    announce_settings(loaded("--port", "9"), "text")
    assert messages(caplog, "INFO") == [f"{SETTINGS_MARK} port = 9 [flag --port], api_key = (hidden) [env TRIVET_WORKER_API_KEY]"]
    (whole,) = messages(caplog, "DEBUG")
    assert "host = 'localhost'  [default]" in whole
    assert "s3cret" not in caplog.text


def test_nothing_changed_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    announce_settings(loaded(), "text")
    assert messages(caplog, "INFO") == [f"{SETTINGS_MARK} all are defaults"]


def test_automatic_is_json_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.root.handlers", [])
    assert [configure_logging("w", format=name) for name in ("auto", "text", "json")] == ["json", "text", "json"]
