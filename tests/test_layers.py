"""Imports run one way: between packages, between the rooms of each service, and towards heavy libraries.

The rule is read out of the sources with `ast`, imports inside functions and under `TYPE_CHECKING` included; what a process really loads
is asked of a fresh interpreter.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FOLDERS = {
    "trivet_proto": "proto",
    "trivet_chassis": "chassis",
    "trivet_checkpoint": "checkpoint",
    "trivet_kernels": "kernels",
    "trivet_worker": "worker_svc",
    "trivet_scheduler": "scheduler_svc",
    "trivet_frontend": "frontend",
    "trivet_doubles": "doubles",
    "trivet_client": "client",
    "trivet": "trivet",
}

MAY_IMPORT = {
    "trivet_proto": set(),
    "trivet_chassis": {"trivet_proto"},
    "trivet_checkpoint": {"trivet_proto"},
    "trivet_kernels": set(),
    "trivet_worker": {"trivet_proto", "trivet_chassis", "trivet_checkpoint", "trivet_kernels"},
    "trivet_scheduler": {"trivet_proto", "trivet_chassis", "trivet_checkpoint"},
    "trivet_frontend": {"trivet_proto", "trivet_chassis", "trivet_checkpoint"},
    "trivet_doubles": {"trivet_proto", "trivet_chassis", "trivet_checkpoint"},
    "trivet_client": {"trivet_proto"},
    "trivet": set(FOLDERS) - {"trivet"},
}

MODEL_LIBRARIES = {"torch", "transformers", "safetensors", "triton"}
MUST_NOT_IMPORT = {
    "trivet_proto": MODEL_LIBRARIES | {"tokenizers"},
    "trivet_chassis": MODEL_LIBRARIES | {"tokenizers"},
    "trivet_checkpoint": {"torch", "transformers", "triton", "grpc"},
    "trivet_kernels": {"transformers", "tokenizers", "grpc"},
    "trivet_worker": {"transformers", "tokenizers"},
    "trivet_scheduler": MODEL_LIBRARIES | {"tokenizers"},
    "trivet_frontend": MODEL_LIBRARIES,
    "trivet_doubles": MODEL_LIBRARIES | {"tokenizers"},
    "trivet_client": MODEL_LIBRARIES | {"tokenizers"},
    "trivet": MODEL_LIBRARIES | {"tokenizers"},
}

# Measurements of the model itself, which `trivet bench` loads by name when they are asked for.
LOADED_WHEN_ASKED_FOR = {"trivet/bench/quality.py", "trivet/bench/quality_scorer.py", "trivet/bench/quality_tokens.py"}

# From the ground up. A room imports from itself and from the lines above it here; rooms on one line stand beside each other.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trivet_frontend": (
        ("config",),
        ("engine",),
        ("text",),
        ("chat",),
        ("serving",),
        ("openai", "rpc", "offline"),
        ("server",),
        ("__main__",),
    ),
    "trivet_scheduler": (
        ("kv",),
        ("request",),
        ("queues", "plan", "forecast"),
        ("replica",),
        ("core",),
        ("awake", "step_limits", "stream_end", "model_check", "sleep"),
        ("config", "bundles"),
        ("engine",),
        ("report",),
        ("replicas", "metrics"),
        ("rpc",),
        ("server",),
        ("__main__",),
    ),
    "trivet_worker": (
        ("forward_context", "weights", "quant"),
        ("layers",),
        ("attention",),
        ("models",),
        ("sampling",),
        ("runner",),
        ("batch_invariance",),
        ("config", "step_thread"),
        ("loading",),
        ("link", "metrics"),
        ("server",),
        ("__main__",),
    ),
    "trivet_doubles": (
        ("tokens", "synthetic", "kv_layers", "ticking"),
        ("vocabulary", "logprobs", "narrowing"),
        ("model", "mock_frontend"),
        ("mock_worker", "mock_scheduler"),
    ),
    "trivet_kernels": (("api", "pages"), ("reference", "cpu", "triton")),
}

DOMAIN_ROOMS = {
    "trivet_frontend": {"text", "chat", "serving"},
    "trivet_scheduler": {"kv", "request", "queues", "plan", "forecast", "replica", "core"},
    "trivet_worker": {"layers", "models", "weights", "quant", "attention", "sampling", "runner"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module by its full name, and where it stands."""

    source: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.source.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def imports_of(package: str) -> tuple[Import, ...]:
    folder = ROOT / FOLDERS[package] / package
    found = tuple(each for source in sorted(folder.rglob("*.py")) for each in imports_in(source, package, folder))
    assert found, f"no source of {package} was found"
    return found


def imports_in(source: Path, package: str, folder: Path) -> Iterator[Import]:
    inside = (package, *source.relative_to(folder).with_suffix("").parts)
    here = inside[:-1]  # for `__init__` too: a dot in it is its own package
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                yield Import(source, node.lineno, f"{base}.{alias.name}")


def room_of(package: str, module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else None


def room_of_source(package: str, source: Path) -> str:
    return source.relative_to(ROOT / FOLDERS[package] / package).with_suffix("").parts[0]


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = [str(each) for each in imports_of(package) if (top := each.module.split(".")[0]) in FOLDERS and top not in allowed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_stay_away_from_libraries_that_are_not_theirs(package: str) -> None:
    wrong = [
        str(each)
        for each in imports_of(package)
        if each.module.split(".")[0] in MUST_NOT_IMPORT[package]
        and each.source.relative_to(ROOT / FOLDERS[package]).as_posix() not in LOADED_WHEN_ASKED_FOR
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_of_a_service_has_its_place(package: str) -> None:
    known = {room for line in ROOMS[package] for room in line} | {"__init__"}
    folder = ROOT / FOLDERS[package] / package
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))}
    assert rooms <= known, f"give them a place in ROOMS: {rooms - known}"


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_from_rooms_below_it(package: str) -> None:
    floor = {room: number for number, line in enumerate(ROOMS[package]) for room in line}
    wrong = []
    for each in imports_of(package):
        here, there = room_of_source(package, each.source), room_of(package, each.module)
        if here == "__init__" or there not in floor or there == here:
            continue
        if floor[there] >= floor[here]:
            wrong.append(str(each))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", DOMAIN_ROOMS)
def test_domain_rooms_import_no_grpc(package: str) -> None:
    wrong = [
        str(each)
        for each in imports_of(package)
        if room_of_source(package, each.source) in DOMAIN_ROOMS[package]
        and (each.module.split(".")[0] == "grpc" or "_pb2_grpc" in each.module)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("trivet_frontend.server", {"torch", "transformers"}),
        ("trivet_frontend.__main__", {"torch", "transformers"}),
        ("trivet_scheduler.server", {"torch", "transformers", "tokenizers"}),
        ("trivet_scheduler.__main__", {"torch", "transformers", "tokenizers"}),
        ("trivet", {"torch", "trivet_frontend"}),
        ("trivet.llm", {"torch", "transformers"}),
        ("trivet.__main__", {"torch", "transformers"}),
        ("trivet_checkpoint", {"torch", "transformers"}),
        ("trivet_client", {"torch", "transformers", "tokenizers", "trivet_chassis"}),
    ],
)
def test_a_service_does_not_load_what_is_not_its_own(module: str, absent: set[str]) -> None:
    question = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []
