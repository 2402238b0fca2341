"""The private folder of a launch: the services' sockets live there, nobody else may look in, and it goes when the launch ends.

A socket's path may have 107 bytes, so the folder takes the first place that is short enough. The guard removes it when the launcher can't.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trivet_chassis.addresses import LONGEST_SOCKET_PATH
from trivet_proto.errors import ErrorKind, TrivetError

LONGEST_NAME = "/trivet-12345678/scheduler-metrics.sock"


@contextmanager
def create_run_directory(environ: Mapping[str, str]) -> Iterator[Path]:
    """A new folder with mode 0700. Raises `TrivetError` when no place takes one."""
    directory = Path(tempfile.mkdtemp(prefix="trivet-", dir=_place(environ)))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _place(environ: Mapping[str, str]) -> str:
    places = [environ.get("XDG_RUNTIME_DIR", ""), environ.get("TMPDIR", ""), "/tmp"]
    for place in places:
        if place.startswith("/") and os.access(place, os.W_OK | os.X_OK) and len((place + LONGEST_NAME).encode()) <= LONGEST_SOCKET_PATH:
            return place
    tried = ", ".join(place for place in places if place)
    raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"no folder for sockets: {tried} can't be written to or are too long; set TMPDIR")
