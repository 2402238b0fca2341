"""Reads `greedy.json`, the references that `make_greedy.py` made; it makes none itself."""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("greedy.json")


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, the 64 ids that follow greedily (through end-of-sequence tokens), and how clearly each one led."""

    name: str
    kind: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    gaps: tuple[float, ...]


def read_references() -> tuple[Reference, ...]:
    return tuple(
        Reference(each["name"], each["kind"], tuple(each["prompt_ids"]), tuple(each["output_ids"]), tuple(each["gaps"]))
        for each in json.loads(FILE.read_text())
    )
