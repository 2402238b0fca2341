"""Builds the native operators when the package is installed; without a compiler the package works too, on torch alone."""

import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "trivet_kernels" / "cpu" / "build.py"


class NativeOperators(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the wheel, or beside the sources of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        module = runpy.run_path(str(BUILD))
        try:
            library: Path = module["build"]()
        except module["BuildFailed"] as failure:
            print(f"the native operators are not built, torch's are used: {failure}", file=sys.stderr)
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["infer_tag"] = True
        build_data["pure_python"] = False
