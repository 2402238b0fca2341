"""`docs/map.md` names every package and, for each mechanism, the function that it is in; here each named function has to exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs" / "map.md").read_text()
PACKAGES = ("proto", "chassis", "checkpoint", "kernels", "worker_svc", "scheduler_svc", "frontend", "doubles", "client", "trivet")
ENTRIES = re.findall(r"`([\w/.-]+\.(?:py|cpp)):([\w.]+)`", MAP)


def names_in(source: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def test_the_map_shows_ten_mechanisms() -> None:
    assert len(set(ENTRIES)) >= 10


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_has_a_sentence_for_each_package(package: str) -> None:
    assert re.search(rf"`{package}/`[^\n]*\.", MAP), f"no sentence for {package}/"


@pytest.mark.parametrize(("file", "name"), ENTRIES, ids=[f"{file}:{name}" for file, name in ENTRIES])
def test_what_the_map_names_exists(file: str, name: str) -> None:
    source = ROOT / file
    assert source.is_file(), f"there is no {file}"
    assert name in names_in(source), f"there is no {name} in {file}"
