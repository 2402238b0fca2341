"""`EngineService` of the mock scheduler: sessions, the model, its bundle, the load. What it does not serve is UNIMPLEMENTED."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import CHUNK_BYTES
from trivet_proto.revision import SCHEMA, agree
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from trivet_doubles.mock_scheduler.life import Life
from trivet_doubles.mock_scheduler.session import DiedError, MockSession, Response
from trivet_doubles.ticking import until_first_ends

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class MockEngineService(engine_pb2_grpc.EngineServiceServicer):
    """`on_death` is called when `die_after` comes; what it does then is its affair."""

    def __init__(self, life: Life, on_death: Callable[[], None]) -> None:
        self._life = life
        self._on_death = on_death
        self._open: dict[str, MockSession] = {}

    # It writes by itself, so that load reports go on while steps wait.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> None:
        """One frontend, until either side ends it, or a fault does."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("a session begins with a hello")
        reason = agree(first.hello.schema)
        if reason is not None:
            raise TrivetError(ErrorKind.FAILED_PRECONDITION, reason)
        name = first.hello.name
        if name in self._open:
            self._open[name].ended.set()
        life, session = self._life, MockSession(self._life)
        self._open[name] = session
        life.sessions += 1
        try:
            for message in self._opening():
                await context.write(message)
            logger.info("frontend %s has a session", name)
            await until_first_ends(
                session.read(request_iterator),
                session.step(),
                session.report(),
                _write(session, context),
                _until_ended(session, name),
                names=("read the frontend", "steps", "load reports", "write", "its end"),
            )
        except DiedError:
            logger.warning("dying on cue after %d outputs", life.outputs)
            self._on_death()
        finally:
            life.sessions -= 1
            session.close()
            if self._open.get(name) is session:
                del self._open[name]
            logger.info("the session of frontend %s has ended", name)

    def announce_draining(self, deadline_ms: int) -> None:
        for session in self._open.values():
            session.announce_drain(deadline_ms)

    def end_sessions(self) -> None:
        for session in self._open.values():
            session.ended.set()

    async def GetModelCard(self, request: engine_pb2.GetModelCardRequest, context: Context) -> engine_pb2.GetModelCardResponse:
        return engine_pb2.GetModelCardResponse(card=self._life.card)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Context) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._life.load())

    async def GetModelBundle(
        self, request: engine_pb2.GetModelBundleRequest, context: Context
    ) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        if request.sha256 not in (b"", self._life.bundle.digest):
            raise TrivetError(ErrorKind.NOT_FOUND, "that model bundle is not served here")
        data = self._life.bundle.to_bytes()
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = types_pb2.Chunk(data=data[offset : offset + CHUNK_BYTES], offset=offset, total=len(data))
            yield engine_pb2.GetModelBundleResponse(chunk=chunk)

    def _opening(self) -> list[Response]:
        life = self._life
        scheduler = types_pb2.Hello(name=life.settings.name, instance=life.instance, schema=SCHEMA)
        return [
            Response(welcome=engine_pb2.Welcome(epoch=life.next_epoch(), scheduler=scheduler)),
            Response(model=engine_pb2.Model(card=life.card)),
            Response(load=life.load()),
        ]


async def _write(session: MockSession, context: Context) -> None:
    while True:
        await context.write(await session.ready.get())
        session.ready.task_done()


async def _until_ended(session: MockSession, name: str) -> None:
    await session.ended.wait()
    raise TrivetError(ErrorKind.ABORTED, f"this session of frontend {name} is over: it dialled anew, or the scheduler leaves")
