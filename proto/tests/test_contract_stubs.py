"""The stubs that are checked in are those of the contracts."""

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parents[1]


def test_the_stubs_checked_in_are_current() -> None:
    result = subprocess.run([sys.executable, str(PROTO / "generate.py"), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_contracts_pass_the_linter() -> None:
    buf = Path(sys.executable).parent / "buf"
    result = subprocess.run([str(buf), "lint"], cwd=PROTO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
