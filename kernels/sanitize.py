"""The native operators under a random driver, built with the sanitizers for addresses and undefined behaviour.

    python kernels/sanitize.py --minutes 60              # what it finds ends it, with the case that found it
    python kernels/sanitize.py --minutes 1 --seed 7      # the same cases again

What it builds is kept in kernels/build/.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from trivet_kernels.cpu.build import SOURCES, BuildFailed, build

HERE = Path(__file__).parent
DRIVER = HERE / "tests" / "native" / "random_driver.cpp"
FOLDER = HERE / "build" / "sanitized"
# The least optimised form that is quick enough; what is found is told with its lines.
FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-O1", "-g1")


def build_driver() -> Path:
    """Raises BuildFailed without a compiler, CalledProcessError where the driver does not compile."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    library = build(extra=FLAGS, library=FOLDER / "_native.so")
    program = FOLDER / "random_driver"
    if program.exists() and program.stat().st_mtime >= max(DRIVER.stat().st_mtime, library.stat().st_mtime):
        return program
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    common = ("-std=c++17", "-Wall", "-Wno-psabi", "-ffp-contract=off", "-pthread", f"-I{SOURCES}", f"-Wl,-rpath,{FOLDER}")
    subprocess.run([str(compiler), *common, *FLAGS, str(DRIVER), str(library), "-o", str(program)], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description="random use of the native operators under sanitizers")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    try:
        program = build_driver()
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    seed = [] if arguments.seed is None else [str(arguments.seed)]
    return subprocess.run([str(program), str(arguments.minutes * 60), *seed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
