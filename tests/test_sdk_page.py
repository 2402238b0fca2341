"""The Python of `docs/sdk.md`, each block a script of its own, run as it stands there but for the address."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trivet_client
from trivet_client.errors import CLASSES

from tests.deployment import Deployment

PAGE = (Path(__file__).parent.parent / "docs" / "sdk.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SCRIPTS = [text for language, text in BLOCKS if language == "python"]
ADDRESS = '"127.0.0.1:8001"'


def title_before(script: str) -> str:
    return re.findall(r"^## (.*)$", PAGE[: PAGE.index(script)], re.MULTILINE)[-1]


def test_every_block_is_run_or_only_shown() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "text"}
    assert len(SCRIPTS) >= 8
    assert all(ADDRESS in script for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=title_before)
def test_a_script_of_the_page_prints_text(server: Deployment, script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script.replace(ADDRESS, repr(server.grpc_address))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert re.search(r"\w{2,}", run.stdout), run.stdout


def test_the_table_of_errors_has_every_kind_by_its_class() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \| ([^|]*) \|", PAGE, re.MULTILINE)
    told = {kind: name for name, kinds in rows for kind in re.findall(r"`(\w+)`", kinds)}
    assert told == {kind.name: error.__name__ for kind, error in CLASSES.items()}


def test_what_the_page_names_is_public() -> None:
    named = {each for script in SCRIPTS for line in re.findall(r"from trivet_client import (.*)", script) for each in line.split(", ")}
    events = set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", PAGE, re.MULTILINE))
    named |= {each for pair in events for each in pair if each and each[0].isupper()}
    assert named <= set(trivet_client.__all__)
