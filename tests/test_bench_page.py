"""The fenced commands of docs/bench.md, each in a small size; those that name a server run against the deployment of this test run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from trivet.commands.bench import SUBCOMMANDS

from tests.deployment import Deployment

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "bench.md").read_text()
COMMANDS: list[str] = re.findall(r"^```sh\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
SMALL = {
    "serve": "--runs 1 --requests 1 --input-tokens 8 --shared-tokens 8 --output-tokens 2",
    "limits": "--rounds 2 --round-time 0.001 --memory 8",
    "kernels": "--formats q4_1 --rows 1 --sequences 1 --contexts 16 --prompts 16 --attention-sequences 1 --attention-context 16 --rounds 1",
    "scheduler": "--requests 2 --seconds 0.3 --steps 10",
    "frontend": "--concurrency 2 --seconds 0.3",
    "offline": "--runs 1 --workload W1",
    "latency": "--batch-size 2 --output-tokens 3 --repeat 1",
}
TABLE = {
    "serve": "TTFT p50",
    "limits": "decode step ms",
    "kernels": "of products",
    "scheduler": "CPU ms/step",
    "frontend": "CPU µs/token",
    "offline": "loop, CPU ms/token",
    "latency": "a step, ms; not computing",
}
"""A column of what each prints."""


def test_the_page_has_every_measurement() -> None:
    shown = {shlex.split(command)[2] for command in COMMANDS}
    assert SMALL.keys() <= shown <= SUBCOMMANDS.keys()


@pytest.mark.long
@pytest.mark.parametrize("command", [command for command in COMMANDS if shlex.split(command)[2] in SMALL])
def test_a_command_of_the_page_prints_its_table(server: Deployment, command: str, tmp_path: Path) -> None:
    _, _, name, *flags = shlex.split(command.replace(ADDRESS, server.base_url))
    own, passed_on = (flags[: flags.index("--")], flags[flags.index("--") :]) if "--" in flags else (flags, [])
    words = [sys.executable, "-m", "trivet", "bench", name, *own, *SMALL[name].split(), *passed_on]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr[-4000:]
    assert TABLE[name] in answer.stdout
    for written in (word for word in own if word.startswith("figures.")):
        assert (tmp_path / written).stat().st_size > 0
