"""A step's answer that came in several messages, put together again.

Rows are split over the parts: row numbers (`logprob_rows`) count within a part, a row's prompt logprobs may come ahead of it. The last part
brings what is said once: status, error, timing.
"""

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_MESSAGE_BYTES
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_proto.v1 import worker_pb2

ROW_ARRAYS = ("handles", "token_counts", "token_ids", "draft_counts", "draft_token_ids", "flags")
LOGPROB_ARRAYS = ("counts", "token_ids", "values", "ranks")
HANDLE_BYTES = 4


class ResultParts:
    """Holds the parts of the one answer that is coming in."""

    def __init__(self) -> None:
        self._parts: list[worker_pb2.StepResult] = []
        self._size = 0

    def join(self, result: worker_pb2.StepResult) -> worker_pb2.StepResult | None:
        """The whole answer, or None while parts are missing.

        Raises INVALID_ARGUMENT for parts out of order, TOO_LARGE for too many bytes in all.
        """
        if not result.HasField("part"):
            if self._parts:
                raise invalid(f"the result of step {result.step} came between the parts of step {self._parts[0].step}", "part")
            return result
        due, part = len(self._parts), result.part
        first = self._parts[0] if self._parts else result
        if part.index != due or part.count <= part.index or result.step != first.step or part.count != first.part.count:
            raise invalid(f"part {part.index} of {part.count} of step {result.step}, but part {due} of step {first.step} is due", "part")
        self._size += result.ByteSize()
        if self._size > MAX_MESSAGE_BYTES:
            raise TrivetError(ErrorKind.TOO_LARGE, f"the result of step {result.step} has more than {MAX_MESSAGE_BYTES} bytes in its parts")
        self._parts.append(result)
        if part.index + 1 < part.count:
            return None
        parts, self._parts, self._size = self._parts, [], 0
        return _joined(parts)


def _joined(parts: list[worker_pb2.StepResult]) -> worker_pb2.StepResult:
    whole = worker_pb2.StepResult()
    whole.CopyFrom(parts[-1])
    whole.ClearField("part")
    for name in ROW_ARRAYS:
        setattr(whole, name, b"".join(getattr(part, name) for part in parts))
    if any(part.flags for part in parts):
        whole.flags = b"".join(part.flags or bytes(len(part.handles) // HANDLE_BYTES) for part in parts)
    rows, before = b"", 0
    for part in parts:
        rows += pack_i32(unpack_i32(part.logprob_rows, "logprob_rows") + before)
        before += len(part.handles) // HANDLE_BYTES
    whole.logprob_rows = rows
    if any(part.HasField("logprobs") for part in parts):
        for name in LOGPROB_ARRAYS:
            setattr(whole.logprobs, name, b"".join(getattr(part.logprobs, name) for part in parts))
    whole.ClearField("prompt_logprobs")
    whole.ClearField("pooled")
    for part in parts:
        whole.prompt_logprobs.extend(part.prompt_logprobs)
        whole.pooled.extend(part.pooled)
    return whole
