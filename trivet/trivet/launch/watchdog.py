"""The guard's process: reads which children live from its standard input, and when that ends unannounced, kills them.

It runs with the standard library alone (`python -I -S`), so that it is small and starts at once, in a session of its own. Input lines are
`watch PID` and `forget PID`. The end of the input means that the launcher is gone: whatever is still watched is killed with its whole
process group, and the folder with the sockets is removed. After a clean stop nothing is watched any more.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the launcher counts
    watched: set[int] = set()
    for line in sys.stdin:
        verb, pid = line.split()
        (watched.add if verb == "watch" else watched.discard)(int(pid))
    for pid in watched:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
