"""Generates the Python stubs of the contracts into `trivet_proto/v1`.

    python proto/generate.py            # write them
    python proto/generate.py --check    # exit 1 if those checked in are not current

The stubs import each other as `trivet_proto.v1.…`: no Python module `trivet.v1` exists, since `trivet` is the command's package.
"""

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
TARGET = HERE / "trivet_proto" / "v1"
PLUGINS = Path(sys.executable).parent
NAMES = ("types", "inference", "engine", "worker")
IMPORT = re.compile(r"\b(from|import) trivet\.v1\b")
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(folder: Path) -> dict[str, str]:
    """Runs protoc into `folder`; returns file name → content with imports rewritten."""
    arguments = [
        "protoc",
        f"-I{HERE}",
        f"-I{files('grpc_tools') / '_proto'}",
        *(f"--plugin={name}={PLUGINS / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        f"--mypy_out={folder}",
        f"--mypy_grpc_out={folder}",
        *(f"trivet/v1/{name}.proto" for name in NAMES),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see its messages above")
    sources = sorted((folder / "trivet" / "v1").iterdir())
    return {source.name: rewrite(source.read_text()) for source in sources}


def rewrite(text: str) -> str:
    text = IMPORT.sub(r"\1 trivet_proto.v1", text)
    return text.replace("trivet.v1 import", "trivet_proto.v1 import").replace("_trivet_proto.v1", "_trivet_proto_v1")


def checked_in() -> dict[str, str]:
    return {path.name: path.read_text() for path in TARGET.iterdir() if path.name.endswith(GENERATED)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare with what is checked in")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
    if check:
        present = checked_in()
        stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
        if stale:
            print(f"stubs are not current: {', '.join(stale)}; run: python proto/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name, text in fresh.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
