"""A party of a contract that does not exist yet: a relay between two services that adds to every message what neither of them knows.

It stands where a service would be dialled and passes each call on to it. Every message, in both directions, gets a field with a number that
no contract of today uses, as a newer build of the peer would send it. The relay knows nothing of the messages otherwise.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from trivet_chassis.rpc import create_channel
from trivet_proto.limits import MAX_MESSAGE_BYTES

UNKNOWN_FIELD = 15000
_LIMITS = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# Wire type 2 is a value with its length before it: protobuf's own encoding of a string field.
ADDITION = _varint(UNKNOWN_FIELD << 3 | 2) + _varint(len(b"later")) + b"later"


@dataclass(slots=True)
class Relay:
    """How many messages went each way with something unknown in them."""

    upward: int = 0
    downward: int = 0


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every method is a pair of streams of bytes: on the wire a single call is a stream of one message."""

    def __init__(self, relay: Relay, target: str) -> None:
        self._relay = relay
        self._target = target

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def pass_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async with create_channel(self._target) as channel:
                call = channel.stream_stream(details.method)(self._upward(requests), metadata=context.invocation_metadata())
                try:
                    async for message in call:
                        self._relay.downward += 1
                        yield message + ADDITION
                except grpc.aio.AioRpcError as error:
                    context.set_trailing_metadata(error.trailing_metadata())
                    await context.abort(error.code(), error.details() or "")
                finally:
                    call.cancel()

        return grpc.stream_stream_rpc_method_handler(pass_on)

    async def _upward(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        with contextlib.suppress(asyncio.CancelledError):
            async for message in requests:
                self._relay.upward += 1
                yield message + ADDITION


@asynccontextmanager
async def relaying(listen: str, target: str) -> AsyncIterator[Relay]:
    """A relay at `listen` (`unix:/path`) before the service at `target`."""
    relay = Relay()
    server = grpc.aio.server(handlers=[_Handler(relay, target)], options=_LIMITS)
    server.add_insecure_port(listen)
    await server.start()
    try:
        yield relay
    finally:
        await server.stop(0)
