"""Compiles the native operators, each file for its own instruction set, into one library beside this file.

    python -m trivet_kernels.cpu.build

It runs when the package is installed. Nothing of torch or Python is linked: a C++17 compiler is all it takes, and which instructions run is
decided when the library is loaded, so that it works on every processor of its architecture.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "_native.so"

COMMON = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=off", "-DNDEBUG")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512")
AMX = (*AVX512, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
FLAGS = {"_avx2": AVX2, "_avx512": AVX512, "_amx": AMX}  # by the ending of a file's name, plainest first
# The products have the same bits in every file for the same expression; here each file is its own and may fuse.
FUSED = "-ffp-contract=fast"
X86 = ("x86_64", "AMD64")


class BuildFailed(Exception):
    """The compiler's words, or that there is none."""


def build(*, extra: Sequence[str] = (), library: Path = LIBRARY) -> Path:
    """Compile unless the library is of these sources and flags; `extra` flags go to every file (sanitizers). Raises BuildFailed."""
    origin, noted = _origin(extra), library.with_suffix(".origin")
    if library.exists() and noted.exists() and noted.read_text() == origin:
        return library
    sources = sorted(SOURCES.glob("*.cpp"), key=_demands)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildFailed("there is no C++ compiler (g++ or clang++, or one named by CXX)")
    if platform.machine() not in X86:
        sources = [source for source in sources if not any(source.stem.endswith(ending) for ending in FLAGS)]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            _run([compiler, *COMMON, *_flags(source), *extra, "-c", str(source), "-o", str(target)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        # Linked beside its place and moved there, so that a process that has the old one open keeps it.
        fresh = library.with_suffix(f".{os.getpid()}.so")
        _run([compiler, "-shared", "-pthread", *extra, "-o", str(fresh), *map(str, objects)])
        fresh.replace(library)
    noted.write_text(origin)
    return library


def _origin(extra: Sequence[str]) -> str:
    """What a library is made of, as a hash. Times do not tell: a copied library is newer than the sources that it is not of."""
    digest = hashlib.sha256(" ".join(extra).encode())
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _flags(source: Path) -> tuple[str, ...]:
    flags = next((flags for ending, flags in FLAGS.items() if source.stem.endswith(ending)), ())
    return (*flags, FUSED) if source.name.startswith(("attention_", "rows_")) else flags


def _demands(source: Path) -> tuple[int, str]:
    """The plainest first: of an inline function that several files share the linker keeps the first, and that one must run anywhere."""
    return len(_flags(source)), source.name


def _run(command: Sequence[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{answer.stderr[-4000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildFailed as failure:
        sys.exit(str(failure))
