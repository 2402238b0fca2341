"""Streams that carry bytes that are no message, too many bytes, or no hello: they end alone."""

from pathlib import Path

import grpc
from deployed import running_request
from played import an_add, end_of, worker_hello
from trivet_proto.errors import ErrorKind
from trivet_proto.limits import MAX_MESSAGE_BYTES, MAX_STREAM_MESSAGE_BYTES
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, types_pb2, worker_pb2

ATTACH, SESSION = "/trivet.v1.WorkerService/Attach", "/trivet.v1.EngineService/Session"


def raw_stream(channel: grpc.aio.Channel, method: str) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    return channel.stream_stream(method)()


def session_hello(name: str = "offender") -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(hello=types_pb2.Hello(name=name, instance=bytes(16), schema=SCHEMA))


async def test_bytes_that_are_no_message_end_their_stream_alone(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        name_that_is_no_text = b"\x0a\x08\x0a\x06\x0a\x04\xff\xfe\xff\xfe"
        for method, hello in (
            (ATTACH, worker_pb2.AttachRequest(hello=worker_hello("offender"))),
            (SESSION, session_hello()),
        ):
            for garbage in (b"\xff\xff\xff garbage", name_that_is_no_text):
                first = raw_stream(channel, method)
                await first.write(garbage)
                assert (await end_of(first)).kind is ErrorKind.INVALID_ARGUMENT
                later = raw_stream(channel, method)
                await later.write(hello.SerializeToString())
                await later.read()
                await later.write(garbage)
                assert (await end_of(later)).kind is ErrorKind.INVALID_ARGUMENT


async def test_a_message_too_large_ends_its_stream_alone(tmp_path: Path) -> None:
    unbounded = [("grpc.max_send_message_length", -1)]
    async with running_request(tmp_path) as (deployed, _), grpc.aio.insecure_channel(deployed.address, options=unbounded) as channel:
        for size in (MAX_STREAM_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES + 1):
            for method, hello, message in (
                (
                    ATTACH,
                    worker_pb2.AttachRequest(hello=worker_hello("offender")),
                    worker_pb2.AttachRequest(reply=worker_pb2.Reply(result=bytes(size))),
                ),
                (SESSION, session_hello(), engine_pb2.SessionRequest(add=an_add([1], [1], 1, kv_transfer=bytes(size)))),
            ):
                call = raw_stream(channel, method)
                await call.write(hello.SerializeToString())
                await call.read()
                await call.write(message.SerializeToString())
                error = await end_of(call)
                assert error.kind is ErrorKind.TOO_LARGE, (size, method)
                assert error.message


async def test_a_stream_begins_with_a_hello_and_has_one(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        for method, hello, other in (
            (
                ATTACH,
                worker_pb2.AttachRequest(hello=worker_hello("offender")),
                worker_pb2.AttachRequest(heartbeat=types_pb2.Heartbeat()),
            ),
            (SESSION, session_hello(), engine_pb2.SessionRequest(heartbeat=types_pb2.Heartbeat())),
        ):
            early = raw_stream(channel, method)
            await early.write(other.SerializeToString())
            assert (await end_of(early)).kind is ErrorKind.INVALID_ARGUMENT
            twice = raw_stream(channel, method)
            await twice.write(hello.SerializeToString())
            await twice.read()
            await twice.write(hello.SerializeToString())
            assert (await end_of(twice)).kind is ErrorKind.INVALID_ARGUMENT
            nothing = raw_stream(channel, method)
            await nothing.done_writing()
            assert (await end_of(nothing)).kind is ErrorKind.INVALID_ARGUMENT


async def test_a_name_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        for name in ("", "a\nb", "n" * 129):
            call = raw_stream(channel, SESSION)
            await call.write(session_hello(name).SerializeToString())
            assert (await end_of(call)).kind is ErrorKind.INVALID_ARGUMENT
        call = raw_stream(channel, SESSION)
        hello = session_hello()
        hello.hello.schema.least_revision = 1000
        await call.write(hello.SerializeToString())
        assert (await end_of(call)).kind is ErrorKind.FAILED_PRECONDITION
