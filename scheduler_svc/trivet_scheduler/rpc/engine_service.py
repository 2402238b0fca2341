"""`EngineService`: sessions of frontends and what they and operators ask in single calls."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.revision import SCHEMA, agree
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from trivet_scheduler.engine import Engine
from trivet_scheduler.replicas.hello import check_name
from trivet_scheduler.report import load_report
from trivet_scheduler.rpc.calls import RecentCalls
from trivet_scheduler.rpc.session import FrontendSession
from trivet_scheduler.rpc.streams import OpenStreams, checked, side_by_side

logger = logging.getLogger(__name__)

FLUSH_S = 1.0  # for the last words of a session that the scheduler ends

Context = grpc.aio.ServicerContext[Any, Any]


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Sessions, and single calls; what this build does not serve yet says so."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._sessions: set[FrontendSession] = set()
        self._calls = RecentCalls()
        self.streams = OpenStreams("frontend")

    # It writes by itself: a generator that is suspended in a write to a peer that does not read could not be ended from here.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> None:
        """One frontend, until either side ends it."""
        messages = checked(request_iterator)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("a session begins with a hello")
        check_name(first.hello.name, "frontend")
        reason = agree(first.hello.schema)
        if reason is not None:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, reason)
        session = FrontendSession(self._engine, first.hello)
        await context.send_initial_metadata(())  # were it to go with the first message, that could not be given up half-way
        async with self.streams.hold(session.name, session.instance, session.stream):
            self._welcome(session)
            self._sessions.add(session)
            logger.info("frontend %s has a session", session.name)
            try:
                await side_by_side(
                    f"session {session.name}",
                    ended=session.stream.wait(),
                    read=_read(session, messages),
                    watch=session.watch(),
                    write=_write(session, context),
                )
            finally:
                self._sessions.discard(session)
                session.stream.decide(None)
                logger.info("the session of frontend %s has ended", session.name)

    def _welcome(self, session: FrontendSession) -> None:
        scheduler = types_pb2.Hello(name=self._name, instance=self._engine.instance, schema=SCHEMA)
        welcome = engine_pb2.Welcome(epoch=session.epoch, scheduler=scheduler)
        session.outbox.put_control(engine_pb2.SessionResponse(welcome=welcome))
        if self._engine.card is not None:
            session.take_model(self._engine.card)
        if self._engine.draining:
            session.announce_drain(0)
        session.outbox.put_load(load_report(self._engine))
        self._engine.add_session(session)

    def announce_draining(self, deadline_ms: int) -> None:
        for session in self._sessions:
            session.announce_drain(deadline_ms)

    async def end_sessions(self) -> None:
        """Say what is left to say, then end every session with UNAVAILABLE."""
        error = TrivetError(ErrorKind.UNAVAILABLE, "the scheduler is shutting down")
        sessions = list(self._sessions)
        flushes = [session.outbox.until_empty() for session in sessions]
        try:
            async with asyncio.timeout(FLUSH_S):
                await asyncio.gather(*flushes)
        except TimeoutError:
            logger.warning("a frontend did not read its last messages within %g s", FLUSH_S)
        for session in sessions:
            session.stream.decide(error)
        for session in sessions:
            await session.stream.until_left(FLUSH_S)

    # ---- single calls ----

    async def GetModelCard(self, request: engine_pb2.GetModelCardRequest, context: Context) -> engine_pb2.GetModelCardResponse:
        if self._engine.card is None:
            raise TrivetError(ErrorKind.UNAVAILABLE, "no worker has attached yet, so no model is served")
        return engine_pb2.GetModelCardResponse(card=self._engine.card)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Context) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=load_report(self._engine))

    async def GetModelBundle(
        self, request: engine_pb2.GetModelBundleRequest, context: Context
    ) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        for offset, data, total in self._engine.bundles.chunks(request.sha256):
            yield engine_pb2.GetModelBundleResponse(chunk=types_pb2.Chunk(data=data, offset=offset, total=total))

    async def ResetPrefixCache(self, request: engine_pb2.ResetPrefixCacheRequest, context: Context) -> engine_pb2.ResetPrefixCacheResponse:
        async def reset() -> engine_pb2.ResetPrefixCacheResponse:
            dropped = self._engine.core.reset_prefix_cache(preempt_running=request.reset_running)
            self._engine.wake()
            return engine_pb2.ResetPrefixCacheResponse(blocks_dropped=dropped)

        return await self._calls.once("ResetPrefixCache", request.call_id, reset)

    async def ListAdapters(self, request: engine_pb2.ListAdaptersRequest, context: Context) -> engine_pb2.ListAdaptersResponse:
        return engine_pb2.ListAdaptersResponse()

    async def Pause(self, request: engine_pb2.PauseRequest, context: Context) -> engine_pb2.PauseResponse:
        """Admit nothing new. What runs stays where it is (keep), finishes before this returns (wait), or is aborted."""
        engine, mode = self._engine, request.mode

        async def pause() -> engine_pb2.PauseResponse:
            engine.pause(freeze=mode in (engine_pb2.PAUSE_MODE_UNSPECIFIED, engine_pb2.PAUSE_MODE_KEEP))
            if mode == engine_pb2.PAUSE_MODE_ABORT:
                engine.abort_all()
            if mode == engine_pb2.PAUSE_MODE_WAIT:
                await engine.until(lambda: engine.is_quiet or not engine.core.paused)
                if not engine.core.paused:
                    raise TrivetError(ErrorKind.ABORTED, "resumed before what ran had finished")
            return engine_pb2.PauseResponse()

        return await self._calls.once("Pause", request.call_id, pause)

    async def Resume(self, request: engine_pb2.ResumeRequest, context: Context) -> engine_pb2.ResumeResponse:
        async def resume() -> engine_pb2.ResumeResponse:
            self._engine.resume()
            return engine_pb2.ResumeResponse()

        return await self._calls.once("Resume", request.call_id, resume)

    async def LoadAdapter(self, request: engine_pb2.LoadAdapterRequest, context: Context) -> engine_pb2.LoadAdapterResponse:
        raise _not_served("adapters")

    async def UnloadAdapter(self, request: engine_pb2.UnloadAdapterRequest, context: Context) -> engine_pb2.UnloadAdapterResponse:
        raise _not_served("adapters")

    async def Sleep(self, request: engine_pb2.SleepRequest, context: Context) -> engine_pb2.SleepResponse:
        async def sleep() -> engine_pb2.SleepResponse:
            await self._engine.sleep.begin(request.level)
            return engine_pb2.SleepResponse()

        return await self._calls.once("Sleep", request.call_id, sleep)

    async def WakeUp(self, request: engine_pb2.WakeUpRequest, context: Context) -> engine_pb2.WakeUpResponse:
        async def wake_up() -> engine_pb2.WakeUpResponse:
            await self._engine.sleep.end()
            return engine_pb2.WakeUpResponse()

        return await self._calls.once("WakeUp", request.call_id, wake_up)

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


async def _read(session: FrontendSession, messages: AsyncIterator[engine_pb2.SessionRequest]) -> None:
    async for message in messages:
        session.take(message)


async def _write(session: FrontendSession, context: Context) -> None:
    while True:
        await context.write(await session.outbox.next())


def _not_served(what: str) -> TrivetError:
    return TrivetError(ErrorKind.UNIMPLEMENTED, f"{what}: not served by this version of the scheduler")
