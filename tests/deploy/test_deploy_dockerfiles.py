"""The Dockerfiles: well made, and in step with the packages and settings that they stand for.

No engine is here to build them. Their install steps run in `test_deploy_images.py`; this is about the rest.
"""

import shutil
import subprocess
import sys
from importlib import util
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from trivet_chassis.addresses import parse_address
from trivet_frontend.config import FrontendSettings
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from tests.deploy.dockerfile import FOLDER, PREFIX, ROOT, read_dockerfile

SERVICES = {
    "frontend": f"127.0.0.1:{FrontendSettings().port}",
    "scheduler": SchedulerSettings().metrics_listen,
    "worker": WorkerSettings().metrics_listen,
}
IMAGES = sorted(path.name.removesuffix(".Dockerfile") for path in FOLDER.glob("*.Dockerfile"))


def install_steps() -> ModuleType:
    """`deploy/docker/install.py`, which is no package's module."""
    spec = util.spec_from_file_location("deploy_install", FOLDER / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_service_has_an_image() -> None:
    assert set(SERVICES) <= set(IMAGES)


@pytest.mark.parametrize("image", IMAGES)
def test_a_linter_finds_nothing(image: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not to be had for this kind of machine")
    answer = subprocess.run([hadolint, str(FOLDER / f"{image}.Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_gets_the_folders_that_its_packages_need_and_no_others(image: str) -> None:
    needed = {package.folder.name for package in install_steps().needed_packages(image)}
    dockerfile = read_dockerfile(image)
    assert set(dockerfile.folders) == needed
    metadata = [each.words[0] for each in dockerfile.all("COPY") if each.words[0].endswith("/pyproject.toml")]
    assert set(metadata) == {f"{folder}/pyproject.toml" for folder in needed}


@pytest.mark.parametrize("image", IMAGES)
def test_sources_come_after_the_libraries_so_that_a_change_of_code_installs_none(image: str) -> None:
    dockerfile = read_dockerfile(image)
    steps = [(each.word, each.rest) for each in dockerfile.instructions]
    libraries = next(place for place, (word, rest) in enumerate(steps) if word == "RUN" and " libraries " in rest)
    first_source = min(place for place, (word, rest) in enumerate(steps) if word == "COPY" and rest.split()[0] in dockerfile.folders)
    assert libraries < first_source
    # Code is a layer of its own in the image too, above what is large.
    copied = [each.words[-1] for each in dockerfile.all("COPY", stage=1)]
    assert copied[0] == f"{PREFIX}/libraries"
    assert copied[-1] == f"{PREFIX}/packages"


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_was_installed_is_in_the_image(image: str) -> None:
    dockerfile = read_dockerfile(image)
    installed = {step[0] for step in dockerfile.install_commands} - {"tools"}
    assert {each.words[-1] for each in dockerfile.all("COPY", stage=1)} == {f"{PREFIX}/{what}" for what in installed}
    assert all(step[1:] in ([], [image, PREFIX], [PREFIX]) for step in dockerfile.install_commands)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_in_particular(image: str) -> None:
    user = read_dockerfile(image).last("USER").rest
    assert user.split(":")[0].isdigit(), "a number, so that an engine can see that it is not root"
    assert int(user.split(":")[0]) > 0


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_starts_exists(image: str) -> None:
    dockerfile = read_dockerfile(image)
    for command in (dockerfile.last("ENTRYPOINT").words, dockerfile.health_command):
        assert command[:2] == ["python", "-m"]
        assert find_spec(command[2]) is not None


@pytest.mark.parametrize(("service", "address"), SERVICES.items())
def test_health_is_asked_where_a_service_answers_by_default(service: str, address: str) -> None:
    dockerfile = read_dockerfile(service)
    assert dockerfile.health_command[3] == f"http://{parse_address(address)}/health/live"
    assert str(parse_address(address).port) in dockerfile.last("EXPOSE").words


def test_the_build_context_has_what_is_copied_and_little_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for image in IMAGES for each in read_dockerfile(image).all("COPY", stage=0) for source in each.words[:-1]}
    assert all(any(source == name or source.startswith(f"{name}/") for name in allowed | {"deploy/docker/install.py"}) for source in copied)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
