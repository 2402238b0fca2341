"""The Python of `docs/offline.md`, each block a program of its own, run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "offline.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def title_before(script: str) -> str:
    return re.findall(r"^## (.*)$", PAGE[: PAGE.index(script)], re.MULTILINE)[-1]


def test_every_block_is_a_program() -> None:
    assert {language for language, _ in BLOCKS} == {"python"}
    assert len(BLOCKS) == 4


@pytest.mark.long
@pytest.mark.parametrize("script", [text for _, text in BLOCKS], ids=title_before)
def test_a_program_of_the_page_prints_text_and_complains_of_nothing(script: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIVET_")}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert re.search(r"\w{2,}", run.stdout), run.stdout
