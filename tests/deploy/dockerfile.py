"""A Dockerfile as the tests read it: its instructions, stage by stage. Knows only the forms that ours use."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
PREFIX = "/opt/trivet"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its continuation lines joined; `stage` counts from 0."""

    stage: int
    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        """The exec form's list, or the rest as a shell splits it."""
        return json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    name: str
    instructions: tuple[Instruction, ...]

    def all(self, word: str, *, stage: int | None = None) -> list[Instruction]:
        return [each for each in self.instructions if each.word == word and stage in (None, each.stage)]

    def last(self, word: str) -> Instruction:
        """Of the image itself, which is the last stage."""
        return [each for each in self.instructions if each.word == word and each.stage == self.instructions[-1].stage][-1]

    @property
    def health_command(self) -> list[str]:
        return json.loads(self.last("HEALTHCHECK").rest.partition("CMD ")[2])

    @property
    def install_commands(self) -> list[list[str]]:
        """The arguments of `install.py`, run by run, in their order."""
        runs = [re.sub(r"--mount=\S+ ", "", each.rest) for each in self.all("RUN")]
        commands = [command.strip() for run in runs for command in run.split("&&") if "install.py" in command]
        return [shlex.split(command.partition("install.py")[2]) for command in commands]

    @property
    def folders(self) -> list[str]:
        """The folders of ours whose sources are copied in."""
        return [each.words[0] for each in self.all("COPY") if len(each.words) == 2 and each.words[0] == each.words[1]]


def read_dockerfile(service: str) -> Dockerfile:
    text = (FOLDER / f"{service}.Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    instructions, stage = [], -1
    for line in filter(None, lines.splitlines()):
        word, _, rest = line.partition(" ")
        stage += word == "FROM"
        instructions.append(Instruction(stage, word, re.sub(r"\s+", " ", rest)))
    return Dockerfile(service, tuple(instructions))
