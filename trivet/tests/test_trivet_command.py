"""The command line itself: help, version, mistakes, and what it must not import."""

import socket
import subprocess
import sys

import pytest
from trivet.__main__ import main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/bin"})


@pytest.mark.parametrize("words", [["--help"], ["help"], ["-h"]])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "config" in shown


def test_no_command_shows_the_help_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: trivet" in capsys.readouterr().out


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trivet ")


def test_a_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "trivet: sevre is no command; did you mean serve? (trivet --help lists them)\n"


def test_a_mistyped_flag_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-modl-len", "4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trivet: --max-modl-len is not known")
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["help", "serve"], ["serve", "--help"]])
def test_a_command_has_help_of_its_own(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 0
    assert "--max-model-len" in capsys.readouterr().out


def test_config_prints_values_with_origins_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--dtype", "float32", "--api-key", "hush"]) == 0
    shown = capsys.readouterr().out
    assert "dtype = 'float32'  [flag --dtype]" in shown
    assert "-m trivet_worker" in shown
    assert "hush" not in shown


def test_a_busy_port_is_an_error_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"trivet: --port {port}: another process listens" in capsys.readouterr().err


def test_the_launcher_imports_no_torch_and_no_model_code() -> None:
    heavy = ("torch", "transformers", "tokenizers")
    code = f"import sys, trivet.__main__; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"
