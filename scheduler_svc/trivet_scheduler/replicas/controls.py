"""Controls that one worker has not answered yet. Owns their call ids; knows nothing of what they do."""

import asyncio
import os

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import worker_pb2

CALL_ID_BYTES = 16


class OpenControls:
    """Of one stream: a control, its call id, and who waits for the reply."""

    def __init__(self) -> None:
        self._open: dict[bytes, asyncio.Future[None]] = {}
        self._reason_closed: str | None = None

    def begin(self, control: worker_pb2.Control) -> tuple[worker_pb2.Control, "asyncio.Future[None]"]:
        """The control with a call id of its own, and what is done when it is answered. Raises UNAVAILABLE when the stream has ended."""
        if self._reason_closed is not None:
            raise TrivetError(ErrorKind.UNAVAILABLE, self._reason_closed)
        numbered = worker_pb2.Control()
        numbered.CopyFrom(control)
        numbered.call_id = os.urandom(CALL_ID_BYTES)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[numbered.call_id] = done
        return numbered, done

    def take(self, reply: worker_pb2.Reply) -> None:
        """A reply to nothing, or to what nobody waits for any more, is left alone."""
        done = self._open.pop(reply.call_id, None)
        if done is None or done.done():
            return
        if reply.HasField("error"):
            done.set_exception(TrivetError.from_proto(reply.error))
        else:
            done.set_result(None)

    def give_up(self, reason: str) -> None:
        """The stream has ended: nobody will answer."""
        self._reason_closed = reason
        for done in self._open.values():
            if not done.done():
                done.set_exception(TrivetError(ErrorKind.UNAVAILABLE, reason))
        self._open.clear()
