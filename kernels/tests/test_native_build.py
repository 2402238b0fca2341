"""When the native operators are compiled anew, on a source of one line."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest
from trivet_kernels.cpu import build as building

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


def answer_of(library: Path, name: str) -> int:
    """What it says, loaded under a name of its own: a process keeps what it has loaded under another."""
    own = library.with_name(name)
    shutil.copy(library, own)
    return int(ctypes.CDLL(str(own)).answer())


def test_a_library_is_compiled_when_it_is_of_other_sources_whatever_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "answer.cpp", tmp_path / "library.so"
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    source.write_text('extern "C" int answer() { return 1; }')
    building.build(library=library)
    assert answer_of(library, "first.so") == 1
    made = library.stat().st_ino
    building.build(library=library)
    assert library.stat().st_ino == made
    os.utime(library, (2**32, 2**32))
    source.write_text('extern "C" int answer() { return 2; }')
    building.build(library=library)
    assert answer_of(library, "second.so") == 2
