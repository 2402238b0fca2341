"""Who this process is to the schedulers: a stable name, and an instance drawn anew in every process."""

import os
import socket
from dataclasses import dataclass, field
from importlib import metadata

from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    version: str
    instance: bytes = field(default_factory=lambda: os.urandom(16))

    def hello(self) -> types_pb2.Hello:
        return types_pb2.Hello(name=self.name, instance=self.instance, schema=SCHEMA, version=self.version)


def identity_of(name: str) -> Identity:
    """The identity for a configured name; without one, a name that two frontends of one host do not share."""
    return Identity(name=name or f"frontend-{socket.gethostname()}-{os.getpid()}", version=software_version())


def software_version() -> str:
    try:
        return metadata.version("trivet-frontend")
    except metadata.PackageNotFoundError:
        return "0+unknown"
