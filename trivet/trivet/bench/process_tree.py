"""A process and all below it: what memory they took, what CPU time, their rest and their end. Read from /proc."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one process: its proportional share now, and the most that was ever resident. MiB."""

    pid: int
    name: str
    pss_mib: float
    peak_rss_mib: float


def tree(pid: int) -> list[int]:
    """The process and its descendants that live."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        below = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in below for each in tree(child))]


def footprint(pid: int) -> Footprint | None:
    """None when it has ended or is another user's."""
    folder = Path(f"/proc/{pid}")
    try:
        pss = sum(int(line.split()[1]) for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        peak = sum(int(line.split()[1]) for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return Footprint(pid, _name(folder), pss * 1024 / MIB, peak * 1024 / MIB)
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    """User and system time of one process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def suspend(pid: int) -> None:
    """It and its descendants stand still, whatever they were at, until `resume`."""
    _signal_tree(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Those that stand still go on."""
    _signal_tree(pid, signal.SIGCONT)


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """An interrupt to its whole session, as from a terminal; then what is left of it is killed. It must have been started in its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_tree(pid: int, number: signal.Signals) -> None:
    for each in tree(pid):
        with suppress(ProcessLookupError):
            os.kill(each, number)


def _name(folder: Path) -> str:
    words = (folder / "cmdline").read_bytes().split(b"\0")
    if b"-m" in words[:-1]:
        return words[words.index(b"-m") + 1].decode(errors="replace")
    return (folder / "comm").read_text().strip()
