"""`WorkerService`: workers that attach, and the model bundles they bring."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from trivet_proto.errors import TrivetError, invalid
from trivet_proto.v1 import worker_pb2, worker_pb2_grpc

from trivet_scheduler.bundles import LARGEST
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import ManagerRegistry
from trivet_scheduler.replicas.link import WorkerLink

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Workers dial; nobody is registered beforehand."""

    def __init__(self, engine: Engine, registry: ManagerRegistry, name: str) -> None:
        self._engine = engine
        self._registry = registry
        self._name = name
        self._links: dict[str, WorkerLink] = {}

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """One replica, until either side ends it."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("an attachment begins with a hello")
        name = first.hello.hello.name
        older = self._links.pop(name, None)
        if older is not None:
            older.end("the same replica has attached anew")
            self._engine.detach(older, older.end_reason)
        link = WorkerLink(self._engine, self._registry, first.hello)
        self._links[name] = link
        link.configure(self._name)
        tasks = [
            asyncio.create_task(self._read(link, request_iterator), name=f"worker {name}: read"),
            asyncio.create_task(link.watch(), name=f"worker {name}: watch"),
        ]
        failure: BaseException | None = None
        try:
            async for message in link.messages():
                yield message
            failure = tasks[0].exception() if tasks[0].done() and not tasks[0].cancelled() else None
            if failure is not None:
                raise failure
        finally:
            for task in tasks:
                task.cancel()
            link.end("its stream ended")
            if self._links.get(name) is link:
                del self._links[name]
            self._engine.detach(link, link.end_reason)

    async def PutBundle(
        self, request_iterator: AsyncIterator[worker_pb2.PutBundleRequest], context: Context
    ) -> worker_pb2.PutBundleResponse:
        digest, data = b"", bytearray()
        async for message in request_iterator:
            digest = digest or message.sha256
            data += message.chunk.data
            if len(data) > LARGEST:
                raise invalid(f"the bundle has more than {LARGEST} bytes", "chunk")
        self._engine.bundles.put(digest, bytes(data))
        return worker_pb2.PutBundleResponse(sha256=digest)

    def announce_draining(self, deadline_ms: int) -> None:
        for link in self._links.values():
            link.drain(deadline_ms, "the scheduler is shutting down")

    async def _read(self, link: WorkerLink, messages: AsyncIterator[worker_pb2.AttachRequest]) -> None:
        try:
            async for message in messages:
                link.take(message)
        except TrivetError as error:
            logger.error("replica %s broke the contract: %s", link.replica.name, error.message)
            link.end(error.message)
            raise
        except Exception:
            link.end("an unexpected error while reading its stream")
            raise
        link.end("it closed its stream")
