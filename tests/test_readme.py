"""The fenced commands of the README, run as they stand there but for the port.

`make serve` is started on a port of its own; what calls the server runs against the deployment of this test run. `make test` is this very
run, and every other command of the README has to be one of these kinds, so that none goes untested.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment import Deployment, eventually, free_port, launched
from tests.gateway import calling

ROOT = Path(__file__).parent.parent
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(sh|python)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
GRPC_ADDRESS = "127.0.0.1:8001"
CURLS = [text for language, text in BLOCKS if language == "sh" and text.startswith("curl ")]
SCRIPTS = [text for language, text in BLOCKS if language == "python"]
MAKES = [text.strip() for language, text in BLOCKS if language == "sh" and text.startswith("make ")]


def run(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_every_command_of_the_readme_is_of_a_kind_that_is_tested() -> None:
    assert MAKES == ["make serve", "make test"]
    assert len(CURLS) >= 2
    assert len(SCRIPTS) >= 1
    assert len(MAKES) + len(CURLS) + len(SCRIPTS) == len(BLOCKS)
    assert all(ADDRESS in text for text in CURLS)
    assert all(ADDRESS in text or GRPC_ADDRESS in text for text in SCRIPTS)


@pytest.mark.parametrize("command", CURLS)
def test_a_curl_command_returns_text(server: Deployment, command: str) -> None:
    printed = run(["bash", "-euo", "pipefail", "-c", command.replace(ADDRESS, server.base_url)])
    assert re.search(r'"(content|text)":\s*"[^"]*\w', printed), printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_script_prints_text(server: Deployment, script: str) -> None:
    printed = run([sys.executable, "-c", script.replace(ADDRESS, server.base_url).replace(GRPC_ADDRESS, server.grpc_address)])
    assert re.search(r"\w+ \w+", printed), printed


@pytest.mark.skipif(not (ROOT / ".venv" / ".set-up").exists(), reason="`make` did not set this environment up, and it would be done here")
async def test_make_serve_brings_up_the_default_model_and_an_interrupt_leaves_nothing() -> None:
    # `make` itself dies of the interrupt once its command is gone.
    serving = launched(("make", "serve"), port=free_port(), exit_codes=(0, 2, -signal.SIGINT))
    async with serving as deployment, calling(deployment.base_url) as gateway:
        answer = await gateway.chat("What is the capital of France?", max_tokens=16)
        assert "Paris" in answer["choices"][0]["message"]["content"]

        async def says_how_to_call_it() -> bool:
            return f"curl -s {deployment.base_url}" in deployment.log()

        await eventually(says_how_to_call_it, within=5, what="it prints how to call it")
