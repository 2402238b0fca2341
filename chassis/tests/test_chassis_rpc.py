"""gRPC servers and channels: limits, reflection, errors both ways, and request ids."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from trivet_chassis.logging import request_id
from trivet_chassis.rpc import ERROR_KEY, RpcServer, abort, create_channel, create_server, error_of, request_id_metadata
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_MESSAGE_BYTES, MIB
from trivet_proto.v1 import types_pb2

SERVICE = "test.v1.Echo"
Message = types_pb2.Error
ERRORS = {
    "invalid": TrivetError(ErrorKind.INVALID_ARGUMENT, "n: 0 is below 1", param="n"),
    "busy": TrivetError(ErrorKind.OVERLOADED, "the queue is full", retry_after_ms=1500),
    "firm": TrivetError(ErrorKind.UNAVAILABLE, "gone for good", retryable=False),
    "long": invalid("ü" * 100_000, "prompt"),
    "odd": invalid("a\nb\0c\ud800", "p\ud800"),
}


class Echo:
    """Handlers of each kind; the message's text says what they do."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.cleaned_up = asyncio.Event()

    async def unary(self, message: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        self.request_ids.append(request_id.get())
        await self.act(message, context)
        return message

    async def generator(self, message: Message, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Message]:
        try:
            yield message
            await self.act(message, context)
            while message.message == "endless":
                yield Message(message="x" * 10_000)
            yield message
        finally:
            self.cleaned_up.set()

    async def writer(self, messages: AsyncIterator[Message], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for message in messages:
            await self.act(message, context)
            await context.write(message)

    async def collector(self, messages: AsyncIterator[Message], context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        texts = [message.message async for message in messages]
        await self.act(Message(message=texts[-1]), context)
        return Message(message=",".join(texts))

    async def act(self, message: Message, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if message.message in ERRORS:
            raise ERRORS[message.message]
        if message.message == "bug":
            raise RuntimeError("inner secret")
        if message.message == "unserved":
            raise NotImplementedError("Method not implemented!")
        if message.message == "unfinished":
            raise NotImplementedError("inner secret")
        if message.message == "abort":
            await abort(context, ERRORS["invalid"])
        if message.message == "log":
            logging.getLogger("echo").warning("seen")
        if message.message == "huge":
            message.message = "x" * (MAX_MESSAGE_BYTES + 1)

    def register(self, server: grpc.aio.Server) -> None:
        codec: Any = {"request_deserializer": Message.FromString, "response_serializer": Message.SerializeToString}
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary, **codec),
            "Generator": grpc.unary_stream_rpc_method_handler(self.generator, **codec),
            "Writer": grpc.stream_stream_rpc_method_handler(self.writer, **codec),
            "Collector": grpc.stream_unary_rpc_method_handler(self.collector, **codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Caller:
    """A client of `Echo`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        codec: Any = {"request_serializer": Message.SerializeToString, "response_deserializer": Message.FromString}
        self.channel = channel
        self.unary = channel.unary_unary(f"/{SERVICE}/Unary", **codec)
        self.generator = channel.unary_stream(f"/{SERVICE}/Generator", **codec)
        self.writer = channel.stream_stream(f"/{SERVICE}/Writer", **codec)
        self.collector = channel.stream_unary(f"/{SERVICE}/Collector", **codec)
        self.unknown = channel.unary_unary(f"/{SERVICE}/Unknown", **codec)

    async def call(self, kind: str, text: str) -> list[str]:
        """The texts of all answers."""
        message = Message(message=text)
        async with asyncio.timeout(20):
            if kind == "unary":
                return [(await self.unary(message)).message]
            if kind == "collector":
                return [(await self.collector(iter([message]))).message]
            stream = self.generator(message) if kind == "generator" else self.writer(iter([message]))
            return [answer.message async for answer in stream]


KINDS = ["unary", "generator", "writer", "collector"]


@contextlib.asynccontextmanager
async def running(
    echo: Echo, listen: str = "127.0.0.1:0", *, write_timeout_s: float | None = None
) -> AsyncIterator[tuple[RpcServer, Caller]]:
    server = await create_server(listen, register=echo.register, services=[SERVICE], write_timeout_s=write_timeout_s)
    await server.start()
    try:
        async with create_channel(str(server.address)) as channel:
            yield server, Caller(channel)
    finally:
        await server.stop(0)


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def caller(echo: Echo) -> AsyncIterator[Caller]:
    async with running(echo) as (_, caller):
        yield caller


async def failure(caller: Caller, kind: str, text: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.call(kind, text)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_handlers_of_each_kind_answer(caller: Caller, kind: str) -> None:
    assert set(await caller.call(kind, "hello")) == {"hello"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["invalid", "busy", "firm"])
async def test_an_error_crosses_whole(caller: Caller, kind: str, name: str) -> None:
    caught = await failure(caller, kind, name)
    raised, error = ERRORS[name], error_of(caught)
    assert caught.code() is raised.appearance.grpc_status
    assert caught.details() == raised.message
    for field in ("kind", "message", "param", "retryable", "retry_after_ms"):
        assert getattr(error, field) == getattr(raised, field)


@pytest.mark.parametrize("name", ["long", "odd"])
async def test_a_text_that_gRPC_could_not_carry_still_arrives_as_its_error(caller: Caller, name: str) -> None:
    error = error_of(await failure(caller, "unary", name))
    assert error.kind is ErrorKind.INVALID_ARGUMENT
    assert (error.message[0], str(error.param)[0]) == (ERRORS[name].message[0], "p")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["bug", "unfinished"])
async def test_a_bug_is_internal_for_the_caller_and_a_traceback_in_the_log(
    caller: Caller, caplog: pytest.LogCaptureFixture, kind: str, text: str
) -> None:
    caught = await failure(caller, kind, text)
    error = error_of(caught)
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert error.kind is ErrorKind.INTERNAL
    assert "secret" not in str(caught.details()) + error.message
    (record,) = [record for record in caplog.records if record.name == "trivet_chassis.rpc_errors"]
    assert record.exc_info is not None
    assert "inner secret" in str(record.exc_info[1])
    assert await caller.call("unary", "after") == ["after"]


async def test_an_error_of_ours_is_logged_and_one_of_the_client_is_not(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    await failure(caller, "unary", "invalid")
    assert not caplog.records
    await failure(caller, "unary", "firm")
    assert "UNAVAILABLE: gone for good" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_may_abort_by_itself(caller: Caller, kind: str) -> None:
    assert error_of(await failure(caller, kind, "abort")).param == "n"


async def test_methods_that_are_not_served_say_so(caller: Caller) -> None:
    error = error_of(await failure(caller, "unary", "unserved"))
    assert error.kind is ErrorKind.UNIMPLEMENTED
    assert SERVICE in error.message
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.unknown(Message())
    assert error_of(caught.value).kind is ErrorKind.UNIMPLEMENTED


async def test_a_cancelled_stream_cleans_up_at_once_without_the_garbage_collector(echo: Echo, caller: Caller) -> None:
    gc.disable()
    try:
        stream = caller.generator(Message(message="endless"))
        await stream.read()
        stream.cancel()
        async with asyncio.timeout(5):
            await echo.cleaned_up.wait()
    finally:
        gc.enable()


async def test_messages_up_to_the_limit_pass_both_ways(caller: Caller) -> None:
    text = "x" * (5 * MIB)
    assert await caller.call("unary", text) == [text]


async def test_a_message_over_the_limit_is_refused_by_either_end_and_the_channel_stays_usable(caller: Caller) -> None:
    for text in ("x" * (MAX_MESSAGE_BYTES + 1), "huge"):
        caught = await failure(caller, "unary", text)
        error = error_of(caught)
        assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.kind is ErrorKind.TOO_LARGE
        assert str(MAX_MESSAGE_BYTES) in error.message
        assert await caller.call("unary", "after") == ["after"]


async def test_the_request_id_travels_in_the_metadata(echo: Echo, caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    token = request_id.set("r-1")
    try:
        await caller.unary(Message(message="a"), metadata=request_id_metadata())
    finally:
        request_id.reset(token)
    await caller.unary(Message(message="b"), metadata=(("x-request-id", "y" * 10_000),))
    assert request_id_metadata() == ()
    await caller.unary(Message(message="c"), metadata=request_id_metadata())
    assert echo.request_ids[0] == "r-1"
    assert len(echo.request_ids[1]) == 32
    assert len(echo.request_ids[2]) == 32


async def test_an_internal_error_names_the_request_id(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.unary(Message(message="bug"), metadata=(("x-request-id", "r-7"),))
    assert str(caught.value.details()).endswith("r-7")


def bare(code: grpc.StatusCode, *trailing: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INTERNAL, ErrorKind.INTERNAL),
        (grpc.StatusCode.UNKNOWN, ErrorKind.INTERNAL),
        (grpc.StatusCode.DATA_LOSS, ErrorKind.INTERNAL),
        (grpc.StatusCode.NOT_FOUND, ErrorKind.NOT_FOUND),
        (grpc.StatusCode.UNAVAILABLE, ErrorKind.UNAVAILABLE),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorKind.UNIMPLEMENTED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorKind.TOO_LARGE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorKind.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, ErrorKind.CANCELLED),
        (grpc.StatusCode.ABORTED, ErrorKind.ABORTED),
    ],
)
def test_a_status_of_gRPCs_own_becomes_the_nearest_kind(code: grpc.StatusCode, kind: ErrorKind) -> None:
    error = error_of(bare(code))
    assert (error.kind, error.message) == (kind, code.name)


def test_metadata_that_is_not_ours_is_not_believed() -> None:
    assert error_of(bare(grpc.StatusCode.NOT_FOUND, (ERROR_KEY, b"\xff\xff"))).kind is ErrorKind.NOT_FOUND


async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    async with create_channel(f"unix:{tmp_path}/none") as channel:
        error = error_of(await failure(Caller(channel), "unary", "x"))
    assert (error.kind, error.retryable) == (ErrorKind.UNAVAILABLE, True)


async def test_a_caller_that_does_not_read_its_stream_is_given_up(echo: Echo) -> None:
    async with running(echo, write_timeout_s=0.2) as (_, caller):
        stream = caller.generator(Message(message="endless"))
        await stream.read()
        async with asyncio.timeout(10):
            await echo.cleaned_up.wait()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_out(stream)
        assert error_of(caught.value).message == "the caller has not read its stream for 0.2 s"
        assert await caller.call("unary", "after") == ["after"]


async def read_out(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_reflection_lists_the_services(caller: Caller) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(caller.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    call.cancel()


async def test_a_unix_socket_serves_is_respected_and_is_gone_afterwards(echo: Echo, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running(echo, f"unix:{path}") as (_, caller):
        assert await caller.call("unary", "hello") == ["hello"]
        with pytest.raises(TrivetError, match="another process listens there"):
            await create_server(f"unix:{path}", register=echo.register, services=[])
        assert await caller.call("unary", "hello") == ["hello"]
    assert not os.path.lexists(path)


async def test_a_taken_port_is_a_configuration_error(echo: Echo) -> None:
    async with running(echo) as (server, _):
        with pytest.raises(TrivetError, match=r"cannot listen on 127\.0\.0\.1") as caught:
            await create_server(str(server.address), register=echo.register, services=[])
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "listen")


async def test_stopping_lets_a_running_call_finish(echo: Echo) -> None:
    async with running(echo) as (server, caller):
        stream = caller.writer()
        await stream.write(Message(message="one"))
        await stream.read()
        stopping = asyncio.create_task(server.stop(10))
        await stream.write(Message(message="two"))
        assert (await stream.read()).message == "two"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK
        async with asyncio.timeout(5):
            await stopping
