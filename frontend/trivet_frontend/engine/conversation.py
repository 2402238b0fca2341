"""One stream to a scheduler, from the dial to its end: hello and welcome, reading, writing, heartbeats, the limit on silence.

A conversation is made for each dial and never used again. It owns the call and its outbox. What the messages mean is for whoever listens
(`session.py`); whether to dial again, too.
"""

import asyncio
from collections import deque
from typing import Protocol, TypeAlias

import grpc.aio
from trivet_chassis.clock import Clock
from trivet_chassis.rpc import Dial
from trivet_proto.errors import TrivetError
from trivet_proto.revision import agree
from trivet_proto.v1 import engine_pb2, types_pb2
from trivet_proto.v1.engine_pb2_grpc import EngineServiceStub

# In quotes: generic for the type checker alone.
SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"

HEARTBEAT_SECONDS = 1.0
# Three heartbeats missed end the stream.
SILENCE_LIMIT_SECONDS = 3 * HEARTBEAT_SECONDS + 0.5
HELLO_TIMEOUT_SECONDS = 5.0


class SessionLostError(Exception):
    """The stream ended, or has to; the words say how, for the log."""


class Listener(Protocol):
    """Who is told of what comes; an exception of `take` ends the stream."""

    def welcome(self, welcome: engine_pb2.Welcome) -> None: ...

    def take(self, message: engine_pb2.SessionResponse, now: float) -> None: ...

    def tick(self, now: float) -> None: ...


class Conversation:
    """One stream; `hold` runs it to its end."""

    def __init__(self, address: str, *, dial: Dial, clock: Clock) -> None:
        self._address = address
        self._dial = dial
        self._clock = clock
        self._outbox: deque[engine_pb2.SessionRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._last_received = 0.0
        self._last_sent = 0.0

    def send(self, message: engine_pb2.SessionRequest) -> None:
        """Put `message` behind what is to be sent; it is lost with the stream."""
        self._outbox.append(message)
        self._outbox_filled.set()

    async def hold(self, hello: types_pb2.Hello, listener: Listener) -> None:
        """Dial and converse until cancelled; raises what ended the stream."""
        async with self._dial(self._address) as channel:
            call = EngineServiceStub(channel).Session()
            try:
                await self._greet(call, hello, listener)
                await _first_failure(
                    asyncio.create_task(self._write(call), name=f"session to {self._address}: write"),
                    asyncio.create_task(self._tick(listener), name=f"session to {self._address}: tick"),
                    asyncio.create_task(self._read(call, listener), name=f"session to {self._address}: read"),
                )
            finally:
                # Nobody else ends a call: one that is only forgotten stays open at the scheduler.
                call.cancel()

    async def _greet(self, call: SessionCall, hello: types_pb2.Hello, listener: Listener) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                await call.write(engine_pb2.SessionRequest(hello=hello))
                first = await call.read()
        except TimeoutError:
            raise SessionLostError("no welcome came") from None
        if not isinstance(first, engine_pb2.SessionResponse):  # the end of the stream
            raise SessionLostError(f"the scheduler refused the session: {await call.code()}: {await call.details()}")
        if first.WhichOneof("message") == "error":
            raise TrivetError.from_proto(first.error)
        if first.WhichOneof("message") != "welcome":
            raise SessionLostError("the first message was no welcome")
        disagreement = agree(first.welcome.scheduler.schema)
        if disagreement is not None:
            raise SessionLostError(disagreement)
        self._last_received = self._last_sent = self._clock.monotonic()
        listener.welcome(first.welcome)

    async def _write(self, call: SessionCall) -> None:
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                try:
                    await call.write(self._outbox.popleft())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the call has ended; who reads learns how
                self._last_sent = self._clock.monotonic()
            self._outbox_filled.clear()

    async def _read(self, call: SessionCall, listener: Listener) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, engine_pb2.SessionResponse):  # the end of the stream
                raise SessionLostError(f"the scheduler ended the session: {(await call.code()).name} {await call.details()}")
            self._last_received = self._clock.monotonic()
            if message.WhichOneof("message") == "error":
                raise TrivetError.from_proto(message.error)
            listener.take(message, self._last_received)

    async def _tick(self, listener: Listener) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = self._clock.monotonic()
            if now - self._last_received > SILENCE_LIMIT_SECONDS:
                raise SessionLostError(f"nothing came for {now - self._last_received:.1f} s")
            if now - self._last_sent >= 0.9 * HEARTBEAT_SECONDS and not self._outbox:
                self.send(engine_pb2.SessionRequest(heartbeat=types_pb2.Heartbeat()))
            listener.tick(now)


async def _first_failure(*tasks: asyncio.Task[None]) -> None:
    """Raise what the first task to fail died of, and end the others. No task group: one swallows a cancel that meets a failure."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
