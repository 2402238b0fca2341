"""Nothing of an `LLM` is left after `close`, at the end of the program, when the program is killed, and after a refusal."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deployment import GONE_WITHIN, READY_WITHIN, eventually
from trivet import LLM, ErrorKind, TrivetError

PROGRAM = """\
import sys, threading
import psutil
from trivet import LLM, SamplingParams

def model():
    return LLM(load_format="dummy", num_kv_blocks=100, max_model_len=512, threads=1, inprocess=sys.argv[1] == "in process")

if sys.argv[2] == "stays":
    left_open = model()
    print("up", flush=True)
    sys.stdin.read()
this = psutil.Process()
before = (len(this.net_connections("all")), threading.active_count())
with model() as llm:
    assert len(llm.generate("One", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
assert not this.children(recursive=True), this.children(recursive=True)
assert (len(this.net_connections("all")), threading.active_count()) == before, (this.net_connections("all"), threading.enumerate())
try:
    llm.generate("One")
except Exception as error:
    assert str(error) == "this LLM has been closed", error
llm.close()
left_open = model()
print("up", flush=True)
left_open.generate("One", SamplingParams(max_tokens=2))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """The place of everything that a program's `LLM` puts on disk, and the mark of its processes."""
    with tempfile.TemporaryDirectory(prefix="trivet-") as name:
        yield Path(name)


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIVET_")}
    environment |= {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(folder: Path) -> list[object]:
    found: list[object] = list(folder.iterdir())
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("where", ["child processes", "in process"])
def test_nothing_is_left_after_closing_nor_when_the_program_ends_without(folder: Path, where: str) -> None:
    program = begin(folder, where, "goes")
    out, err = program.communicate(timeout=READY_WITHIN)
    assert (program.returncode, out, err) == (0, "up\n", "")
    assert not left_behind(folder)


async def test_child_processes_go_with_a_program_that_is_killed(folder: Path) -> None:
    program = begin(folder, "child processes", "stays")
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "up\n"
    assert len(left_behind(folder)) >= 4  # the program, its guard, a scheduler, a worker
    program.send_signal(signal.SIGKILL)
    program.communicate()

    async def is_gone() -> bool:
        return not left_behind(folder)

    await eventually(is_gone, within=GONE_WITHIN, what="all processes and their folder are gone")


@pytest.mark.parametrize("inprocess", [False, True])
def test_settings_that_the_model_cannot_have_are_refused_with_what_it_can(inprocess: bool) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TrivetError, match="max_model_len: 9000 is above the model's context of 8192") as refusal:
        LLM(max_model_len=9000, inprocess=inprocess, progress=False)
    assert refusal.value.kind is ErrorKind.INVALID_ARGUMENT
    assert set(psutil.Process().children(recursive=True)) <= before
