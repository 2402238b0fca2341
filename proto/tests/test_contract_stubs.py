"""The stubs that are checked in are those of the contracts, and the contracts break nothing that was released."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).resolve().parents[1]


def test_the_stubs_checked_in_are_current() -> None:
    result = subprocess.run([sys.executable, str(PROTO / "generate.py"), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_contracts_pass_the_linter() -> None:
    buf = Path(sys.executable).parent / "buf"
    result = subprocess.run([str(buf), "lint"], cwd=PROTO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def breaks(folder: Path) -> str:
    """What the breaking-change check says of the contracts in `folder` against the released ones; empty when nothing breaks."""
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "breaking", "--against", str(PROTO / "released.binpb")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_the_contracts_break_nothing_that_was_released() -> None:
    assert breaks(PROTO) == ""


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("a field that is gone", "  uint64 step = 2; // from 1, without gaps within an epoch\n", ""),
        ("a field of another type", "uint64 step = 2; // from 1", "uint32 step = 2; // from 1"),
        ("a field of another number", "uint64 step = 2; // from 1", "uint64 step = 99; // from 1"),
    ],
)
def test_a_change_that_an_older_peer_would_not_understand_is_found(tmp_path: Path, what: str, old: str, new: str) -> None:
    shutil.copy(PROTO / "buf.yaml", tmp_path)
    shutil.copytree(PROTO / "trivet", tmp_path / "trivet")
    contract = tmp_path / "trivet" / "v1" / "worker.proto"
    text = contract.read_text()
    assert old in text
    contract.write_text(text.replace(old, new))
    assert "worker.proto" in breaks(tmp_path), f"{what} was not found"


def test_a_field_that_is_new_breaks_nothing(tmp_path: Path) -> None:
    shutil.copy(PROTO / "buf.yaml", tmp_path)
    shutil.copytree(PROTO / "trivet", tmp_path / "trivet")
    contract = tmp_path / "trivet" / "v1" / "worker.proto"
    contract.write_text(contract.read_text().replace("  uint64 step = 2; // from 1", "  bool later = 500;\n  uint64 step = 2; // from 1"))
    assert breaks(tmp_path) == ""
