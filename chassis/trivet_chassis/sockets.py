"""Unix socket files: a stale one makes way, a live one is respected, ours goes when we go."""

import socket
from pathlib import Path

from trivet_proto.errors import ErrorKind, TrivetError


def claim(path: str) -> None:
    """Make room for a socket at `path`. Raises when somebody listens there or when something else is in the way."""
    file = Path(path)
    if not file.parent.is_dir():
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{path}: the folder {file.parent} does not exist; make it first")
    if not file.exists() and not file.is_symlink():
        return
    if not file.is_socket():
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{path} exists and is no socket; remove it or take another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            file.unlink(missing_ok=True)
            return
    raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"{path}: another process listens there; stop it or take another path")


def release(path: str) -> None:
    Path(path).unlink(missing_ok=True)
