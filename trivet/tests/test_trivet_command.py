"""The command line itself: help, version, mistakes, and what it must not import."""

import os
import signal
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


def run_python(code: str, **streams: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, stderr=subprocess.PIPE, check=False, **streams)


def test_a_ctrl_c_while_the_program_is_still_loading_ends_it_without_a_word() -> None:
    ended = run_python(
        "import importlib.abc, os, signal, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'trivet.launch.supervisor':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import trivet.__main__\n"
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_ctrl_c_while_the_program_leaves_ends_it_without_a_word() -> None:
    ended = run_python(
        "import atexit, os, signal, sys\n"
        "from trivet.__main__ import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = ['trivet', '--version']\n"
        "sys.exit(main())\n",
        stdout=subprocess.DEVNULL,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_ctrl_c_before_a_command_has_its_own_way_of_stopping_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trivet.commands.serve.load_serve_settings", interrupted)
    assert main(["serve"]) == 128 + signal.SIGINT


def test_an_interrupt_that_is_ignored_stays_ignored_and_loading_leaves_others_alone() -> None:
    code = "import signal; {}; import trivet.__main__; print(signal.getsignal(signal.SIGINT) is {})"
    for before, after in (("0", "signal.default_int_handler"), ("signal.signal(signal.SIGINT, signal.SIG_IGN)", "signal.SIG_IGN")):
        assert run_python(code.format(before, after), stdout=subprocess.PIPE).stdout == "True\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"], ["config", "--workers", "9"], []], ids=" ".join)
def test_a_reader_that_has_left_ends_a_command_without_a_word(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = run_python(f"import sys; from trivet.__main__ import main; sys.argv = ['trivet', *{words!r}]; sys.exit(main())", stdout=writing)
    os.close(writing)
    assert ended.stderr == ""
    # argparse takes no notice of a failed write
    assert ended.returncode in ((0, 128 + signal.SIGPIPE) if words == ["serve", "--help"] else (128 + signal.SIGPIPE,))


def test_output_that_was_closed_from_the_start_is_no_failure() -> None:
    code = "import sys; from trivet.__main__ import main; sys.stdout = None; sys.argv = ['trivet', 'config']; sys.exit(main())"
    ended = run_python(code)
    assert (ended.returncode, ended.stderr) == (0, "")
