"""The order of steps on one stream: parts are joined, numbers follow each other, and what does not fit is the scheduler's fault.

Owns the parts that wait for their last one. Knows nothing of what a step does.
"""

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import worker_pb2


class StepSequence:
    """Of one epoch: the first step is number 1, none is left out."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._parts: worker_pb2.Step | None = None
        self._next_part = 0

    @property
    def last(self) -> int | None:
        """The last step that came whole."""
        return self._last

    def take(self, step: worker_pb2.Step) -> worker_pb2.Step | None:
        """A whole step, or None while parts are missing. Raises ABORTED when a step, or a part of one, was lost or repeated."""
        expected = 1 if self._last is None else self._last + 1
        if step.step != expected:
            raise _out_of_order(f"step {step.step} came where {expected} was due")
        whole = self._join(step)
        if whole is not None:
            self._last = whole.step
        return whole

    def _join(self, step: worker_pb2.Step) -> worker_pb2.Step | None:
        index, count = (step.part.index, step.part.count) if step.HasField("part") else (0, 1)
        if index != self._next_part or index >= count or (self._parts is not None and self._parts.part.count != count):
            raise _out_of_order(f"part {index} of {count} of step {step.step} came where part {self._next_part} was due")
        if count == 1:
            return step
        if self._parts is None:
            self._parts = worker_pb2.Step()
        self._parts.MergeFrom(step)
        self._next_part = index + 1
        if self._next_part < count:
            return None
        whole, self._parts, self._next_part = self._parts, None, 0
        return whole


def _out_of_order(what: str) -> TrivetError:
    return TrivetError(ErrorKind.ABORTED, what)
