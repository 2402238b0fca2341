"""`docker-compose.yml` as Compose itself understands it: variables filled in, anchors merged, short forms written out.

`docker-compose config` needs no engine. Where its binary isn't to be had, the tests that read the result are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
OWN = ("frontend", "scheduler", "worker")
"""The services whose code is here; the others are other people's images."""


@dataclass(frozen=True, slots=True)
class ConfigFailed(Exception):
    message: str


def run_compose(*words: str, overlays: Sequence[str] = (), variables: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    """What `docker-compose` prints, with no variables set but these; raises ConfigFailed with its complaint."""
    binary = shutil.which("docker-compose", path=str(Path(sys.executable).parent)) or shutil.which("docker-compose")
    if binary is None:
        pytest.skip("docker-compose is not to be had for this kind of machine")
    files = [FILE, *(ROOT / "deploy" / f"compose.{overlay}.yml" for overlay in overlays)]
    answer = subprocess.run(
        [binary, *(f"--file={file}" for file in files), "--project-directory", str(folder), *words],
        env={"PATH": os.environ["PATH"], "HOME": str(folder)} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if answer.returncode != 0:
        raise ConfigFailed(answer.stderr)
    return answer.stdout


def resolved(variables: dict[str, str] | None = None, *, overlays: Sequence[str] = (), folder: Path = ROOT) -> dict[str, Any]:
    """The whole project, every profile included. `folder` is where `.env` is looked for."""
    printed = run_compose("--profile", "*", "config", "--format", "json", overlays=overlays, variables=variables, folder=folder)
    return json.loads(printed)


def written() -> dict[str, Any]:
    """The file as it stands, with nothing filled in."""
    return yaml.safe_load(FILE.read_text())


def environment_of(project: dict[str, Any], service: str) -> dict[str, str]:
    """What the container's processes get to see."""
    given = project["services"][service].get("environment", {})
    return {name: value for name, value in given.items() if value is not None}


def mounts_of(project: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, service in project["services"].items():
        for mount in service.get("volumes", ()):
            yield name, mount
