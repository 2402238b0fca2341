"""Unix socket files: a stale one makes way, a live one is respected, ours goes when we go.

Only a refused connection proves that nobody listens; a socket that answers in any other way (a full queue, a lack of rights) stays.
"""

import socket
from pathlib import Path

from trivet_proto.errors import invalid

PROBE_TIMEOUT_S = 1.0

Identity = tuple[int, int]
"""Device and inode of a socket file: whether the file at a path is still the one that was made."""


def claim(path: str) -> None:
    """Make room for a socket at `path`. Raises INVALID_ARGUMENT when somebody listens there or when something else is in the way."""
    file = Path(path)
    try:
        if not file.parent.is_dir():
            raise invalid(f"{path}: the folder {file.parent} does not exist; make it first")
        if not file.exists() and not file.is_symlink():
            return
        if not file.is_socket():
            raise invalid(f"{path} exists and is no socket; remove it or take another path")
        if _is_stale(path):
            file.unlink(missing_ok=True)
            return
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}; take another path") from error
    raise invalid(f"{path}: another process listens there; stop it or take another path")


def identity_of(path: str) -> Identity | None:
    """Which file is at `path` now."""
    try:
        status = Path(path).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def release(path: str, owned: Identity | None = None) -> None:
    """Remove our socket file; with `owned`, only while it is still the one that we made."""
    if owned is None or identity_of(path) == owned:
        Path(path).unlink(missing_ok=True)


def _is_stale(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False
