"""The model bundle of a scheduler: fetched once, kept by its digest.

A frontend on another host needs no model files: configuration, tokenizer and template come from the scheduler. What arrives is checked
against the digest that the scheduler announced. What the files mean is not known here.
"""

import hashlib
import logging

import grpc.aio
from trivet_chassis.rpc import Dial, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2
from trivet_proto.v1.engine_pb2_grpc import EngineServiceStub

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_SECONDS = 60.0
# A bundle is a tokenizer and a few small files; what is larger is a mistake or an attack.
MAX_BUNDLE_BYTES = 512 * 1024 * 1024


class BundleCache:
    """Bundles by digest, as bytes; owns what it has fetched."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._bundles: dict[bytes, bytes] = {}

    async def get(self, address: str, digest: bytes) -> bytes:
        """The bundle `digest`, from the scheduler at `address` if it is not here yet; raises `TrivetError` if that fails."""
        if digest not in self._bundles:
            self._bundles = {digest: await _fetch(self._dial, address, digest)}
        return self._bundles[digest]


async def _fetch(dial: Dial, address: str, digest: bytes) -> bytes:
    received = bytearray()
    # A channel of its own: a long answer on the session's connection would hold up token deltas.
    async with dial(address) as channel:
        call = EngineServiceStub(channel).GetModelBundle(engine_pb2.GetModelBundleRequest(sha256=digest), timeout=FETCH_TIMEOUT_SECONDS)
        try:
            async for response in call:
                received += response.chunk.data
                if len(received) > MAX_BUNDLE_BYTES:
                    raise TrivetError(ErrorKind.TOO_LARGE, f"the model bundle is larger than {MAX_BUNDLE_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            message = f"the scheduler at {address} did not give its model bundle: {error_of(error).message}"
            raise TrivetError(ErrorKind.UNAVAILABLE, message) from error
    found = hashlib.sha256(received).digest()
    if digest and found != digest:
        raise TrivetError(ErrorKind.UNAVAILABLE, f"the model bundle from {address} has digest {found.hex()}, announced was {digest.hex()}")
    logger.info("fetched the model bundle %s (%d bytes) from %s", found.hex()[:12], len(received), address)
    return bytes(received)
