"""Faults on cue: what a mock scheduler refuses, when a session of it stalls, ends, talks nonsense or kills the process.

Outputs are `StepOutputs` messages. What is decided here is carried out elsewhere.
"""

from dataclasses import dataclass

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.packing import pack_i32, pack_u32
from trivet_proto.v1 import engine_pb2

RETRY_AFTER_MS = 100
UNKNOWN_HANDLE = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and when; nothing by default. 0 means never."""

    refuse_every: int = 0  # requests of the whole scheduler
    fail_after: int = 0  # tokens of a request
    end_session_after: int = 0  # outputs of a session
    stall_after: int = 0
    stall_for: float = 5.0  # seconds
    silent: bool = False  # no load reports while it stalls
    unknown_rows: bool = False
    garbage_after: int = 0
    die_after: int = 0  # outputs of the whole scheduler

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for cues that can never come."""
        if self.silent and not self.stall_after:
            raise invalid("silent: it is said of a stall, so stall_after is needed too", "silent")

    def refusal_of(self, ordinal: int) -> TrivetError | None:
        """What the so manieth request of this scheduler's life is refused with."""
        if self.refuse_every and ordinal % self.refuse_every == 0:
            return TrivetError(ErrorKind.OVERLOADED, f"request {ordinal} is refused on cue", retry_after_ms=RETRY_AFTER_MS)
        return None

    def failure_of(self, num_tokens: int) -> TrivetError | None:
        """What a request that has had so many tokens fails with."""
        if self.fail_after and num_tokens >= self.fail_after:
            return TrivetError(ErrorKind.INTERNAL, f"the request fails on cue after {num_tokens} tokens")
        return None

    def spoil(self, outputs: engine_pb2.StepOutputs, ordinal: int) -> None:
        """Make the so manieth output of a session what it must not be, if it is its turn."""
        if self.unknown_rows:
            outputs.handles += pack_u32([UNKNOWN_HANDLE])
            outputs.token_counts += pack_i32([0])
            outputs.finish_reasons += bytes(1)
            if outputs.stop_token_ids:
                outputs.stop_token_ids += pack_i32([-1])
        if ordinal == self.garbage_after:
            outputs.token_ids += b"\xff\xff\xff"
