"""`python -m trivet_chassis.probe URL`: one health question, answered by the exit code. For health checks of containers.

Asks over HTTP, at a service's metrics address or at the gateway: `http://127.0.0.1:7101/health/ready`. Exit code 0 when the answer is 200,
1 when it is another one or none comes in time, 2 when the question is not one. It runs every few seconds beside a busy service, so it
imports nothing but what the question takes.
"""

import http.client
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

TIMEOUT_S = 2.0

EXIT_HEALTHY = 0
EXIT_UNHEALTHY = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; what was answered goes to standard output, where a container's health log keeps it."""
    words = sys.argv[1:] if argv is None else argv
    parts = urlsplit(words[0]) if len(words) == 1 else None
    if parts is None or parts.scheme != "http" or not parts.hostname or not parts.path:
        print("usage: python -m trivet_chassis.probe http://HOST:PORT/health/live|ready|progress", file=sys.stderr)
        return EXIT_USAGE
    try:
        status, text = _ask(parts.netloc, parts.path)
    except (OSError, http.client.HTTPException) as error:
        print(f"{words[0]}: no answer ({error or type(error).__name__})")
        return EXIT_UNHEALTHY
    print(f"{words[0]}: {status} {text}")
    return EXIT_HEALTHY if status == http.client.OK else EXIT_UNHEALTHY


def _ask(netloc: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(200).decode(errors="replace").strip()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
