"""No orphans, even after `kill -9` of the launcher: a tiny second process holds a pipe to us and kills the children when it closes.

A death signal from the kernel (PR_SET_PDEATHSIG) would do for the children but not for theirs, nor for the socket files, and only on Linux.
Owns the guard process and the list of what it watches; should the guard itself die, the next use starts another.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from trivet.launch import watchdog

LEAVE_WITHIN_S = 5.0


class Guard:
    """Use as a context manager around everything that starts children; each child leads a process group of its own."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._watched: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the guard isn't up"
        return self._process.pid

    def __enter__(self) -> "Guard":
        self._process = self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._leave(self._process)
        self._process = None

    def watch(self, pid: int) -> None:
        self._watched.add(pid)
        self._tell(f"watch {pid}\n")

    def forget(self, pid: int) -> None:
        """Must be called before `pid` can be used for another process, so before its zombie is reaped."""
        self._watched.discard(pid)
        self._tell(f"forget {pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process is not None, "the guard isn't up"
        try:
            self._write(self._process, line)
        except BrokenPipeError:
            self._leave(self._process)
            self._process = self._start()
            for pid in self._watched:
                self._write(self._process, f"watch {pid}\n")

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(self._run_directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @staticmethod
    def _write(process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode())
        process.stdin.flush()

    @staticmethod
    def _leave(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # what was buffered can't be delivered any more
            process.stdin.close()
        try:
            process.wait(LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
