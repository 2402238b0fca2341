"""What is checked before anything starts: that the gateway's address is free. The check holds nothing; the frontend binds it for good."""

import errno
import os
import socket

from trivet_chassis.sockets import claim
from trivet_proto.errors import TrivetError, invalid

from trivet.launch.plan import Gateway


def refuse_busy_address(gateway: Gateway) -> None:
    """Raises `TrivetError` naming the flag whose value can't work."""
    if gateway.uds:
        try:
            claim(gateway.uds)
        except TrivetError as error:
            raise invalid(f"--uds {error.message}", "uds") from error
        return
    if gateway.port == 0:
        raise invalid("--port 0: callers need to know the port; give one", "port")
    try:
        found = socket.getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise invalid(f"--host {gateway.host}: {error.strerror or error}", "host") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port in TIME_WAIT is free. A second listener is refused all the same.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                raise _cannot_listen(gateway, error) from error


def _cannot_listen(gateway: Gateway, error: OSError) -> TrivetError:
    if error.errno == errno.EADDRINUSE:
        return invalid(
            f"--port {gateway.port}: another process listens on {gateway.host}:{gateway.port}; stop it or take another port", "port"
        )
    if error.errno == errno.EACCES:
        return invalid(f"--port {gateway.port}: ports below 1024 need privileges; take another port", "port")
    return invalid(f"--host {gateway.host}: {os.strerror(error.errno or 0)}", "host")
