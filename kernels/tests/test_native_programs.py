"""What Python cannot reach of the native operators, by C++ programs beside this file.

The packed products of every weight format on every instruction set that this processor has, held to a loop in double and to their own
bits: a row alone, in any batch, under any split. The team of threads, whose members now and then stay away.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from trivet_kernels.cpu.build import LIBRARY, SOURCES

PROGRAMS = Path(__file__).parent / "native"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None or not LIBRARY.exists(), reason="the native operators are not built here")


def run_program(name: str, folder: Path) -> None:
    program = folder / name
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", f"-I{SOURCES}", f"-Wl,-rpath,{LIBRARY.parent}", "-pthread")
    source = PROGRAMS / f"{name}.cpp"
    subprocess.run([str(COMPILER), *flags, str(source), str(LIBRARY), "-o", str(program)], check=True, timeout=120)
    answer = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=240)
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert "all right" in answer.stdout


def test_products_are_right_and_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    run_program("matmul_test", tmp_path)


def test_a_team_does_everything_once_however_long_a_member_stays_away(tmp_path: Path) -> None:
    run_program("team_test", tmp_path)
