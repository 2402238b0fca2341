"""The model bundles that workers brought, by digest: what frontends fetch. The newest few are kept."""

import hashlib
from collections.abc import Iterator

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES

KEPT = 2
LARGEST = 8 * MAX_MESSAGE_BYTES


class BundleStore:
    """Bytes by SHA-256."""

    def __init__(self) -> None:
        self._bundles: dict[bytes, bytes] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._bundles

    def put(self, digest: bytes, data: bytes) -> None:
        """Raises INVALID_ARGUMENT when the bytes are not what the digest says."""
        if hashlib.sha256(data).digest() != digest:
            raise invalid("the bundle's bytes do not have the SHA-256 that it was announced with", "sha256")
        self._bundles[digest] = data
        while len(self._bundles) > KEPT:
            del self._bundles[next(iter(self._bundles))]

    def chunks(self, digest: bytes) -> Iterator[tuple[int, bytes, int]]:
        """(offset, piece, total size); an empty digest means the newest. Raises NOT_FOUND."""
        if not digest and self._bundles:
            digest = next(reversed(self._bundles))
        data = self._bundles.get(digest)
        if data is None:
            raise TrivetError(ErrorKind.NOT_FOUND, "no worker has brought that model bundle yet", retryable=True)
        for offset in range(0, len(data), CHUNK_BYTES):
            yield offset, data[offset : offset + CHUNK_BYTES], len(data)
