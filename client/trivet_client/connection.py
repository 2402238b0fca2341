"""How a client reaches a frontend: address, TLS, API key, and the options of the gRPC channel.

Nothing is dialled here, and no call is made.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import grpc
from trivet_proto.limits import MAX_MESSAGE_BYTES

from trivet_client.errors import invalid

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A server that vanished without a word is noticed within half a minute; an idle connection is left alone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Calls are made again by our own rule (`retrying.py`), which knows what the caller has seen; gRPC's would add to it.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS to the server; each is the path of a PEM file.

    `root_certificates`: whom to trust; absent: the roots that gRPC brings along. `certificate_chain` and `private_key`, both or none:
    who this client is, for servers that ask. `server_name`: the name that the server's certificate must have, where it isn't the
    address's host.
    """

    root_certificates: str | os.PathLike[str] | None = None
    certificate_chain: str | os.PathLike[str] | None = None
    private_key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise invalid("tls: certificate_chain and private_key belong together; give both or none", "tls")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises `InvalidRequestError` for one that cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates, "root_certificates"),
            private_key=_read(self.private_key, "private_key"),
            certificate_chain=_read(self.certificate_chain, "certificate_chain"),
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """All that a channel and its calls are made with."""

    target: str
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, str | int], ...]
    metadata: tuple[tuple[str, str], ...]


def connection_to(address: str, *, tls: Tls | None, api_key: str | None) -> Connection:
    """Raises `InvalidRequestError` for an address, a file or a key that cannot be right."""
    if api_key is not None and not _KEY.fullmatch(api_key):
        raise invalid("api_key: it is empty or has characters other than visible ASCII", "api_key")
    options = CHANNEL_OPTIONS
    if tls is not None and tls.server_name is not None:
        options += (("grpc.ssl_target_name_override", tls.server_name),)
    return Connection(
        target=_target_of(address),
        credentials=None if tls is None else tls.credentials(),
        options=options,
        metadata=() if api_key is None else (("authorization", f"Bearer {api_key}"),),
    )


def _target_of(address: str) -> str:
    if address.startswith("unix:/") or ((match := _HOST_AND_PORT.fullmatch(address)) and int(match[1]) <= 65535):
        return address
    if "://" in address:
        raise invalid(f"address: {address!r}: leave the scheme out, write host:port; TLS is the argument tls", "address")
    raise invalid(f"address: {address!r} is not host:port, [v6]:port or unix:/path", "address")


def _read(path: str | os.PathLike[str] | None, name: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"tls: {name}: {os.fspath(path)!r} cannot be read: {error.strerror}", "tls") from None
