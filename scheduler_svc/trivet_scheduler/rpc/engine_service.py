"""`EngineService`: sessions of frontends and what they and operators ask in single calls."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.revision import SCHEMA, agree
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from trivet_scheduler.engine import Engine
from trivet_scheduler.rpc.session import FrontendSession

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.5

Context = grpc.aio.ServicerContext[Any, Any]


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Sessions, and single calls; what this build does not serve yet says so."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._by_name: dict[str, tuple[FrontendSession, asyncio.Event]] = {}

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """One frontend, until either side ends it."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("a session begins with a hello")
        reason = agree(first.hello.schema)
        if reason is not None:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, reason)
        session, ended = self._open(first.hello)
        tasks = [
            asyncio.create_task(self._read(session, request_iterator), name=f"session {session.name}: read"),
            asyncio.create_task(self._watch(session), name=f"session {session.name}: watch"),
            asyncio.create_task(ended.wait(), name=f"session {session.name}: replaced"),
        ]
        try:
            while True:
                message = asyncio.ensure_future(session.outbox.next())
                await asyncio.wait({message, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                if any(task.done() for task in tasks):
                    message.cancel()
                    for task in tasks:
                        if task.done() and task.exception() is not None:
                            raise task.exception()  # type: ignore[misc]
                    return
                yield message.result()
        finally:
            for task in tasks:
                task.cancel()
            self._close(session)

    async def GetModelCard(self, request: engine_pb2.GetModelCardRequest, context: Context) -> engine_pb2.GetModelCardResponse:
        if self._engine.card is None:
            raise TrivetError(ErrorKind.UNAVAILABLE, "no worker has attached yet, so no model is served")
        return engine_pb2.GetModelCardResponse(card=self._engine.card)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Context) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._engine.load())

    async def GetModelBundle(
        self, request: engine_pb2.GetModelBundleRequest, context: Context
    ) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        for offset, data, total in self._engine.bundles.chunks(request.sha256):
            yield engine_pb2.GetModelBundleResponse(chunk=types_pb2.Chunk(data=data, offset=offset, total=total))

    async def ResetPrefixCache(self, request: engine_pb2.ResetPrefixCacheRequest, context: Context) -> engine_pb2.ResetPrefixCacheResponse:
        dropped = self._engine.core.reset_prefix_cache(preempt_running=request.reset_running)
        self._engine.wake()
        return engine_pb2.ResetPrefixCacheResponse(blocks_dropped=dropped)

    async def ListAdapters(self, request: engine_pb2.ListAdaptersRequest, context: Context) -> engine_pb2.ListAdaptersResponse:
        return engine_pb2.ListAdaptersResponse()

    async def Pause(self, request: engine_pb2.PauseRequest, context: Context) -> engine_pb2.PauseResponse:
        """Admit nothing new; what runs goes on, or is aborted."""
        self._engine.core.paused = True
        if request.mode == engine_pb2.PAUSE_MODE_ABORT:
            for waiting in list(self._engine.core.requests):
                self._engine.core.abort(waiting)
        self._engine.wake()
        return engine_pb2.PauseResponse()

    async def Resume(self, request: engine_pb2.ResumeRequest, context: Context) -> engine_pb2.ResumeResponse:
        self._engine.core.paused = False
        self._engine.wake()
        return engine_pb2.ResumeResponse()

    async def LoadAdapter(self, request: engine_pb2.LoadAdapterRequest, context: Context) -> engine_pb2.LoadAdapterResponse:
        raise _not_served("adapters")

    async def UnloadAdapter(self, request: engine_pb2.UnloadAdapterRequest, context: Context) -> engine_pb2.UnloadAdapterResponse:
        raise _not_served("adapters")

    async def Sleep(self, request: engine_pb2.SleepRequest, context: Context) -> engine_pb2.SleepResponse:
        raise _not_served("sleep")

    async def WakeUp(self, request: engine_pb2.WakeUpRequest, context: Context) -> engine_pb2.WakeUpResponse:
        raise _not_served("sleep")

    async def Profile(self, request: engine_pb2.ProfileRequest, context: Context) -> engine_pb2.ProfileResponse:
        raise _not_served("profiling")

    async def SubscribeKvEvents(
        self, request: engine_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        raise _not_served("KV events")
        yield

    async def PutBlob(self, request_iterator: AsyncIterator[engine_pb2.PutBlobRequest], context: Context) -> engine_pb2.PutBlobResponse:
        raise _not_served("blobs")

    async def GetBlob(self, request: engine_pb2.GetBlobRequest, context: Context) -> AsyncIterator[engine_pb2.GetBlobResponse]:
        raise _not_served("blobs")
        yield

    def announce_draining(self, deadline_ms: int) -> None:
        for session, _ in self._by_name.values():
            session.outbox.put_control(
                engine_pb2.SessionResponse(draining=types_pb2.Draining(deadline_ms=deadline_ms, reason="the scheduler is shutting down"))
            )

    # ---- sessions ----

    def _open(self, hello: types_pb2.Hello) -> tuple[FrontendSession, asyncio.Event]:
        """Accepting a name ends the older stream of that name."""
        older = self._by_name.get(hello.name)
        if older is not None:
            older[1].set()
            self._drop(older[0])
        epoch = self._engine.next_epoch()
        session, ended = FrontendSession(self._engine, hello, epoch), asyncio.Event()
        welcome = engine_pb2.Welcome(epoch=epoch, scheduler=types_pb2.Hello(name=self._name, instance=self._engine.instance, schema=SCHEMA))
        session.outbox.put_control(engine_pb2.SessionResponse(welcome=welcome))
        if self._engine.card is not None:
            session.take_model(self._engine.card)
        session.outbox.put_load(self._engine.load())
        self._engine.add_session(session)
        self._by_name[hello.name] = (session, ended)
        logger.info("frontend %s has a session", hello.name)
        return session, ended

    def _close(self, session: FrontendSession) -> None:
        current = self._by_name.get(session.name)
        if current is not None and current[0] is session:
            del self._by_name[session.name]
            self._drop(session)
            logger.info("the session of frontend %s has ended", session.name)

    def _drop(self, session: FrontendSession) -> None:
        with contextlib.suppress(ValueError):
            self._engine.remove_session(session)

    async def _read(self, session: FrontendSession, messages: AsyncIterator[engine_pb2.SessionRequest]) -> None:
        async for message in messages:
            session.take(message)

    async def _watch(self, session: FrontendSession) -> None:
        """Report once a second; end the session of a silent frontend."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            session.outbox.put_load(self._engine.load())
            if self._engine.clock.monotonic() - session.heard_at > SILENCE_S:
                raise TrivetError(ErrorKind.ABORTED, f"no heartbeat of frontend {session.name} for {SILENCE_S:g} s")


def _not_served(what: str) -> TrivetError:
    return TrivetError(ErrorKind.UNIMPLEMENTED, f"{what}: not served by this version of the scheduler")
