"""The fenced command of docs/scheduling.md, and the names that the page gives."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scheduling.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ROOMS = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)


def test_the_measurement_prints_the_table_of_the_page() -> None:
    ((language, command),) = BLOCKS
    assert language == "sh"
    shortened = command.strip().replace(".venv/bin/trivet", f"{sys.executable} -m trivet") + " --steps 20"
    answer = subprocess.run(["bash", "-c", shortened], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    header, _, *rows = [line for line in answer.stdout.splitlines() if line.startswith("|")]
    assert "| " + " | ".join(cell.strip() for cell in header.strip("|").split("|")) + " |" in PAGE
    assert len(rows) == 5


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_that_the_page_names_exists(room: str) -> None:
    assert (ROOT / "scheduler_svc" / "trivet_scheduler" / "core" / f"{room}.py").is_file()
