"""The native operators, built with sanitizers, on random cases for some seconds; `make asan` does it for as long as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest
from trivet_kernels.cpu.build import LIBRARY

SCRIPT = Path(__file__).parents[1] / "sanitize.py"


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.skipif(not LIBRARY.exists(), reason="the native operators are not built here")
def test_random_use_of_the_native_operators_is_sound() -> None:
    answer = subprocess.run([sys.executable, str(SCRIPT), "--minutes", "0.33"], capture_output=True, text=True, check=False, timeout=1200)
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-6000:]
    assert "all right" in answer.stdout
