"""What goes to a worker in one step and what comes back, as the domain knows it: arrays by row, no wire."""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import TrivetError
from trivet_proto.v1 import types_pb2

from trivet_scheduler.request import Request, Status

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewWork:
    """A request that the worker does not know, in full."""

    request: Request
    handle: int
    token_ids: Ints
    block_ids: Ints
    num_computed: int
    num_scheduled: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one replica: new requests first, then known ones. `new_blocks` is ragged over the known rows."""

    number: int
    new: list[NewWork]
    known_handles: Ints
    known_scheduled: Ints
    known_computed: Ints
    new_blocks: Ints
    new_block_counts: Ints
    finished_handles: list[int]
    blocks_to_zero: list[int]
    resync: int | None
    num_tokens: int
    forecast_s: float | None  # how long it is expected to run, each of its iterations; None: nobody knows yet
    run_ahead: int = 1  # most iterations


@dataclass(slots=True)
class Flight:
    """A step under way: its rows, and what each was to do."""

    number: int
    requests: list[Request]
    handles: list[int]
    slots: NDArray[np.int64]  # of the requests in their table
    counts: Ints
    samples: NDArray[np.bool_]  # rows that give a token
    sent_at: float
    num_tokens: int
    forecast_s: float | None
    undone: bool = False  # a failed step before it took its effects back
    iterations: int = 1  # that the worker may run at most, each a token for every row
    answered: int = 0  # of them

    @property
    def left(self) -> int:
        """Iterations that may still come."""
        return self.iterations - self.answered


class StepStatus(Enum):
    DONE = auto()
    FAILED = auto()
    SKIPPED = auto()


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """As `Logprobs` in the contract, unpacked: per token, the chosen id first, then the top n."""

    counts: Ints
    token_ids: Ints
    values: NDArray[np.float32]
    ranks: Ints


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A worker's answer. Row i is the flight's row i.

    Lists, not arrays: all of it is gone through row by row, and a step has so few rows that numpy's fixed costs would be most of the work.
    """

    number: int
    status: StepStatus
    handles: list[int]
    token_counts: list[int]
    token_ids: list[int]
    logprob_rows: list[int]
    logprobs: LogprobArrays | None
    prompt_logprobs: list[tuple[int, int, types_pb2.Logprobs]]  # worker handle, first position
    flags: bytes  # one a row, or none at all
    error: TrivetError | None = None
    iteration: int = 0
    is_last: bool = True  # of the step's iterations


@dataclass(slots=True, eq=False)
class Delta:
    """What is new in one request, for whoever asked for it."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobArrays | None = None
    prompt_logprobs: list[tuple[int, types_pb2.Logprobs]] = field(default_factory=list)  # first position
    cached_tokens: int | None = None
    timing: tuple[int, int] | None = None  # microseconds queued, in prefill
    finish: Status | None = None


def cut_logprobs(arrays: LogprobArrays, first: int, last: int) -> LogprobArrays:
    """The logprobs of tokens [first, last)."""
    ends = np.cumsum(arrays.counts)
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1]) if last else 0
    return LogprobArrays(arrays.counts[first:last], arrays.token_ids[start:stop], arrays.values[start:stop], arrays.ranks[first:last])
