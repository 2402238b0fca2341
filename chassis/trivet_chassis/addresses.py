"""Addresses that services listen on and dial: `host:port`, `[v6]:port` or `unix:/path`."""

import ipaddress
import re
from dataclasses import dataclass

from trivet_proto.errors import invalid

LONGEST_SOCKET_PATH = 107  # bytes; what Linux takes

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Either a host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def target(self) -> str:
        """As grpc takes it."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.target


def parse_address(text: str, name: str = "address") -> Address:
    """Raises INVALID_ARGUMENT with what would have been right."""
    if text.startswith("unix:"):
        return _parse_unix(text, name)
    host, colon, port = text.rpartition(":")
    if "://" in text:
        raise invalid(f"{name}: {text!r}: leave the scheme out, write host:port", name)
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise invalid(f"{name}: {text!r} is not host:port, [v6]:port or unix:/path", name)
    if host.startswith("[") and host.endswith("]"):
        bare = host[1:-1]
        if not _is_v6(bare):
            raise invalid(f"{name}: {text!r}: {bare!r} is no IPv6 address", name)
        return Address(host=bare, port=int(port))
    if _is_v6(host):
        raise invalid(f"{name}: {text!r}: write an IPv6 address in brackets, as in [::1]:{port}", name)
    if not _HOST.fullmatch(host):
        raise invalid(f"{name}: {text!r}: {host!r} is no name of a host", name)
    return Address(host=host, port=int(port))


def is_public(address: Address) -> bool:
    """Whether others than this machine may reach it: anything but a Unix socket or a loopback address."""
    if address.is_unix or address.host.lower() == "localhost":
        return False
    try:
        return not ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return True


def refuse_public(address: Address, name: str, *, allowed: bool, way_out: str) -> None:
    """Nobody opens a service to the network by accident."""
    if is_public(address) and not allowed:
        raise invalid(f"{name}: {address} can be reached from other machines; {way_out}", name)


def _parse_unix(text: str, name: str) -> Address:
    path = text.removeprefix("unix:")
    if path.startswith("///"):
        path = path.removeprefix("//")
    if not path.startswith("/") or path.startswith("//") or "\0" in path or path.endswith("/"):
        raise invalid(f"{name}: {text!r} needs the absolute path of a socket, as in unix:/run/trivet/scheduler.sock", name)
    if len(path.encode()) > LONGEST_SOCKET_PATH:
        raise invalid(f"{name}: the socket path has {len(path.encode())} bytes, {LONGEST_SOCKET_PATH} are possible", name)
    return Address(path=path)


def _is_v6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
