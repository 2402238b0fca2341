"""The folder of the sockets: private, short, and gone afterwards."""

from pathlib import Path

import pytest
from trivet.launch.run_directory import LONGEST_NAME, create_run_directory
from trivet_chassis.addresses import parse_address
from trivet_proto.errors import TrivetError


def test_it_is_private_and_goes(tmp_path: Path) -> None:
    with create_run_directory({"TMPDIR": "/tmp"}) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "scheduler.sock").touch()
    assert not directory.exists()


def test_a_place_that_is_too_long_for_a_socket_is_passed_over(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with create_run_directory({"XDG_RUNTIME_DIR": str(deep)}) as directory:
        assert not directory.is_relative_to(deep)
        parse_address(f"unix:{directory}/scheduler-metrics.sock")


def test_the_longest_name_is_counted_in_full() -> None:
    with create_run_directory({"TMPDIR": "/tmp"}) as directory:
        assert len(f"{directory}/scheduler-metrics.sock") == len("/tmp" + LONGEST_NAME)


def test_no_place_at_all_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(TrivetError, match="set TMPDIR"), create_run_directory({"TMPDIR": "/nowhere"}):
        pass
