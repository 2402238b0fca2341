"""The packed products of every weight format on every instruction set that this processor has, by a C++ program beside this file.

It holds them to a loop in double, and to their own bits: a row alone, in any batch, under any split.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from trivet_kernels.cpu.build import LIBRARY, SOURCES

SOURCE = Path(__file__).parent / "native" / "matmul_test.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None or not LIBRARY.exists(), reason="the native operators are not built here")
def test_products_are_right_and_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    program = tmp_path / "matmul_test"
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", f"-I{SOURCES}", f"-Wl,-rpath,{LIBRARY.parent}", "-pthread")
    subprocess.run([str(COMPILER), *flags, str(SOURCE), str(LIBRARY), "-o", str(program)], check=True, timeout=120)
    answer = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=240)
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert "all right" in answer.stdout
