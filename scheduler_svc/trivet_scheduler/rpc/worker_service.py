"""`WorkerService`: workers that attach, and the model bundles they bring."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.v1 import worker_pb2, worker_pb2_grpc

from trivet_scheduler.bundles import LARGEST
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import ManagerRegistry
from trivet_scheduler.replicas.link import WorkerLink
from trivet_scheduler.rpc.streams import LEAVE_S, OpenStreams, checked, side_by_side

logger = logging.getLogger(__name__)

LEAVING = "the scheduler is shutting down"

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Workers dial; nobody is registered beforehand."""

    def __init__(self, engine: Engine, registry: ManagerRegistry, name: str) -> None:
        self._engine = engine
        self._registry = registry
        self._name = name
        self._links: set[WorkerLink] = set()
        self.streams = OpenStreams("worker")

    # It writes by itself: a generator that is suspended in a write to a peer that does not read could not be ended from here.
    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> None:
        """One replica, until either side ends it."""
        messages = checked(request_iterator)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("an attachment begins with a hello")
        link = WorkerLink(self._engine, self._registry, first.hello)
        await context.send_initial_metadata(())  # were it to go with the first message, that could not be given up half-way
        async with self.streams.hold(link.name, link.instance, link.stream):
            self._links.add(link)
            link.configure(self._name)
            try:
                await side_by_side(
                    f"worker {link.name}",
                    ended=link.stream.wait(),
                    read=_read(link, messages),
                    watch=link.watch(),
                    write=_write(link, context),
                )
            except TrivetError as error:
                logger.warning("the stream of replica %s ends: %s", link.name, error.message)
                link.stream.decide(error)
                raise
            finally:
                self._links.discard(link)
                link.stream.decide(TrivetError(ErrorKind.UNAVAILABLE, "its stream ended"))

    async def PutBundle(
        self, request_iterator: AsyncIterator[worker_pb2.PutBundleRequest], context: Context
    ) -> worker_pb2.PutBundleResponse:
        """Raises FAILED_PRECONDITION for a bundle that no attached worker announced: it would push out one that is needed."""
        digest, data = b"", bytearray()
        async for message in checked(request_iterator):
            digest = digest or message.sha256
            if not any(link.card.bundle_sha256 == digest for link in self._links):
                raise TrivetError(ErrorKind.FAILED_PRECONDITION, "no attached worker has announced a bundle of that digest", param="sha256")
            data += message.chunk.data
            if len(data) > LARGEST:
                raise TrivetError(ErrorKind.TOO_LARGE, f"the bundle has more than {LARGEST} bytes", param="chunk")
        self._engine.bundles.put(digest, bytes(data))
        return worker_pb2.PutBundleResponse(sha256=digest)

    def announce_draining(self, deadline_ms: int) -> None:
        for link in self._links:
            link.announce_drain(deadline_ms, LEAVING)

    async def end_attachments(self) -> None:
        """Let the workers go, each with a word that it may dial elsewhere."""
        links = list(self._links)
        for link in links:
            link.stream.decide(TrivetError(ErrorKind.UNAVAILABLE, LEAVING))
        for link in links:
            await link.stream.until_left(LEAVE_S)


async def _read(link: WorkerLink, messages: AsyncIterator[worker_pb2.AttachRequest]) -> None:
    async for message in messages:
        link.take(message)


async def _write(link: WorkerLink, context: Context) -> None:
    while True:
        await context.write(await link.next_message())
