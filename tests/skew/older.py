"""The packages as an older commit has them, beside those of this one.

An older service is this interpreter with the older packages first on its path. What it needs from outside is taken from the environment at
hand, so the two commits must agree on their dependencies; their contracts need not be the same, which is what is tested.
"""

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASED_CONTRACT = "proto/released.binpb"
REVISION_VARIABLE = "TRIVET_SKEW_REVISION"


@dataclass(frozen=True, slots=True)
class OlderTree:
    """The files of `revision` in a folder of their own."""

    revision: str
    folder: Path

    def python_path(self) -> str:
        """The value of PYTHONPATH under which an interpreter imports the older packages."""
        packages = sorted(project.parent for project in self.folder.glob("*/pyproject.toml"))
        return os.pathsep.join(str(package) for package in packages)

    def imports_from(self, module: str) -> str:
        """The file that `module` has for an interpreter under that path."""
        words = (sys.executable, "-c", f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)")
        environment = os.environ | {"PYTHONPATH": self.python_path()}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def older_revision() -> str | None:
    """The commit that the variable names, or the one before this that released a contract, or the one before this; None without history."""
    named = os.environ.get(REVISION_VARIABLE)
    if named:
        return _git("rev-parse", "--verify", f"{named}^{{commit}}")
    return _git("rev-list", "--max-count=1", "HEAD~1", "--", RELEASED_CONTRACT) or _git("rev-parse", "--verify", "HEAD~1")


def check_out(revision: str, folder: Path) -> OlderTree:
    """Write the files of `revision` into `folder`; the work tree is left alone."""
    archive = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return OlderTree(revision, folder)


def _git(*words: str) -> str | None:
    """What git prints; None when it fails or prints nothing, as in a clone without history or a folder that is no clone."""
    try:
        answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return (answer.stdout.strip() or None) if answer.returncode == 0 else None
