"""A frontend without text, for tests and measurements: one session with a scheduler, token ids in, token ids out.

It owns the session and the handles of one epoch, keeps what came for each child and checks the contract as it reads: rising handles, one
finish each, nothing after it. It does not dial again.
"""

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias

import grpc
from trivet_chassis.rpc import create_channel, error_of
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u32, unpack_i32, unpack_u8, unpack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from trivet_doubles.logprobs import Entry, entries_of
from trivet_doubles.ticking import until_first_ends

HEARTBEAT_S = 1.0

Call: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"


@dataclass(slots=True)
class Child:
    """One child of a request: what came so far. `finish` is a `FinishReason`, 0 while it runs."""

    handle: int
    token_ids: list[int] = field(default_factory=list)
    finish: int = 0
    error: TrivetError | None = None
    cached_tokens: int | None = None
    stop_token: int = -1
    logprobs: list[Entry] = field(default_factory=list)  # of each output token, where asked for
    prompt_logprobs: dict[int, Entry] = field(default_factory=dict)  # by position
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_ended(self, within_s: float = 10.0) -> list[int]:
        """Its tokens, once it has finished. Raises its error, or TimeoutError."""
        async with asyncio.timeout(within_s):
            await self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.token_ids


class MockFrontend:
    """An async context manager: inside, the session is open and the model is known."""

    def __init__(self, address: str, name: str = "mock-frontend", *, on_outputs: Callable[[int], None] = lambda tokens: None) -> None:
        self.card: types_pb2.ModelCard | None = None
        self.load: engine_pb2.Load | None = None
        self.draining = False
        self.num_outputs = 0  # messages
        self._address = address
        self._name = name
        self._on_outputs = on_outputs
        self._children: dict[int, Child] = {}
        self._next_handle = itertools.count(1)
        self._out: deque[engine_pb2.SessionRequest] = deque()
        self._filled = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- requests ----

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        seed: int = 0,
        n: int = 1,
        sampling: types_pb2.SamplingParams | None = None,
        resume: Sequence[engine_pb2.ResumeState] = (),
        uid: bytes = b"",
    ) -> list[Child]:
        """Send a request; its children are filled from now on. `sampling`, where given, goes with its own max_tokens."""
        children = [Child(next(self._next_handle)) for _ in range(n)]
        self._children |= {child.handle: child for child in children}
        add = engine_pb2.Add(
            handles=pack_u32([child.handle for child in children]),
            uid=uid or os.urandom(16),
            task=types_pb2.TASK_GENERATE,
            prompt_token_ids=pack_i32(prompt),
            sampling=sampling or types_pb2.SamplingParams(max_tokens=max_tokens),
            seed=seed,
            resume=resume,
        )
        self.send(engine_pb2.SessionRequest(add=add))
        return children

    def stop(self, child: Child, count: int) -> None:
        self.send(engine_pb2.SessionRequest(stop=engine_pb2.Stop(handles=pack_u32([child.handle]), counts=pack_i32([count]))))

    def abort(self, child: Child) -> None:
        reason = engine_pb2.ABORT_REASON_CLIENT_GONE
        self.send(engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=pack_u32([child.handle]), reason=reason)))

    def send(self, message: engine_pb2.SessionRequest) -> None:
        self._out.append(message)
        self._filled.set()

    async def until(self, condition: Callable[[], object], within_s: float = 10.0) -> None:
        """Wait until `condition` holds; it is looked at whenever something came. Raises what the session ended with, or TimeoutError."""
        async with asyncio.timeout(within_s):
            while not condition():
                if self._task is not None and self._task.done():
                    self._task.result()
                self._changed.clear()
                await self._changed.wait()

    # ---- the session ----

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._live(), name=f"session of {self._name}")
        try:
            await self.until(lambda: self.card is not None)
        except BaseException:
            self._task.cancel()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._task is not None, "it was entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        """Until the stream ends; then every child that still runs has the reason as its error."""
        hello = types_pb2.Hello(name=self._name, instance=os.urandom(16), schema=SCHEMA)
        self._out.appendleft(engine_pb2.SessionRequest(hello=hello))
        failure = TrivetError(ErrorKind.CANCELLED, "the mock frontend was closed")
        try:
            async with create_channel(self._address) as channel:
                call = engine_pb2_grpc.EngineServiceStub(channel).Session(self._outgoing())
                try:
                    await until_first_ends(self._read(call), self._beat(), names=("read the session", "heartbeats"))
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = error_of(error)
            raise failure from error
        except TrivetError as error:
            failure = error
            raise
        finally:
            for child in list(self._children.values()):
                self._end(child, types_pb2.FINISH_REASON_ERROR, failure)
            self._changed.set()

    async def _outgoing(self) -> AsyncIterator[engine_pb2.SessionRequest]:
        while True:
            while self._out:
                yield self._out.popleft()
            self._filled.clear()
            await self._filled.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.send(engine_pb2.SessionRequest(heartbeat=types_pb2.Heartbeat()))

    async def _read(self, call: Call) -> None:
        async for message in call:
            kind = message.WhichOneof("message")
            if kind == "outputs":
                self._take(message.outputs)
            elif kind == "load":
                self.load = message.load
            elif kind == "model":
                self.card = message.model.card
            elif kind == "draining":
                self.draining = True
            elif kind == "error":
                raise TrivetError.from_proto(message.error)
            self._changed.set()
        raise TrivetError(ErrorKind.UNAVAILABLE, "the scheduler ended the session")

    def _take(self, outputs: engine_pb2.StepOutputs) -> None:
        self.num_outputs += 1
        handles = unpack_u32(outputs.handles, "handles").tolist()
        counts = unpack_i32(outputs.token_counts, "token_counts").tolist()
        finishes = unpack_u8(outputs.finish_reasons, "finish_reasons").tolist()
        ids = unpack_i32(outputs.token_ids, "token_ids").tolist()
        stops = unpack_i32(outputs.stop_token_ids, "stop_token_ids").tolist() or [-1] * len(handles)
        errors = {row.handle: TrivetError.from_proto(row.error) for row in outputs.errors}
        self._on_outputs(len(ids))
        for chunk in outputs.prompt_logprobs:
            self._children[chunk.handle].prompt_logprobs |= dict(enumerate(entries_of(chunk.logprobs), chunk.first_position))
        for row, cached in zip(unpack_i32(outputs.first_rows).tolist(), unpack_i32(outputs.cached_tokens).tolist(), strict=True):
            self._children[handles[row]].cached_tokens = cached
        entries = iter(entries_of(outputs.logprobs) if outputs.logprob_rows else ())
        for row in unpack_i32(outputs.logprob_rows).tolist():
            self._children[handles[row]].logprobs += itertools.islice(entries, counts[row])
        at = 0
        for handle, count, finish, stop in zip(handles, counts, finishes, stops, strict=True):
            child = self._children[handle]
            child.token_ids += ids[at : at + count]
            at += count
            if finish:
                child.stop_token = stop
                self._end(child, finish, errors.get(handle))
        assert at == len(ids), "as many tokens as the counts say"

    def _end(self, child: Child, finish: int, error: TrivetError | None) -> None:
        del self._children[child.handle]
        child.finish, child.error = finish, error
        child.ended.set()
