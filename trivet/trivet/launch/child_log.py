"""What a child writes to its standard streams: passed on line by line, and the last of it kept for the day it dies.

Owns the reading end of one pipe. Whole lines are passed on so that two services' lines never mix; a child's own children may keep the pipe
open after it has gone, so its end is the child's exit, not the pipe's.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable

READ_BYTES = 64 * 1024
LONGEST_LINE = 64 * 1024
KEPT_LINES = 200
READS_AT_END = 64
"""More than a pipe holds; whoever still writes after the child's end isn't listened to for ever."""

Sink = Callable[[bytes], None]


class ChildLog:
    """`write_end` is for the child; close it here with `child_has_it` once the child was started."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._open = True
        asyncio.get_running_loop().add_reader(self._read_end, self._on_readable)

    def child_has_it(self) -> None:
        os.close(self.write_end)

    def last_lines(self, count: int) -> list[str]:
        return list(self._lines)[-count:]

    def finish(self) -> None:
        """Pass on what is left in the pipe and close it."""
        for _ in range(READS_AT_END):
            if not self._open or not self._on_readable():
                break
        self._close()

    def _on_readable(self) -> bool:
        """Read once; whether there was anything."""
        try:
            piece = os.read(self._read_end, READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._close()
            return False
        *lines, self._partial = (self._partial + piece).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._partial) > LONGEST_LINE:
            self._pass_on(self._partial)
            self._partial = b""
        return True

    def _pass_on(self, line: bytes) -> None:
        self._lines.append(line.decode(errors="replace").rstrip("\r"))
        self._sink(line + b"\n")

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._partial:
            self._pass_on(self._partial)
            self._partial = b""
