"""A request as the scheduler knows it: tokens, counters, state.

The counters that every step reads live in numpy columns, one row per live request (`RequestTable`), so that a step over hundreds of
decoding requests is a handful of array operations. `Request` is a view on its row plus what is touched rarely.

The counters of a row, in tokens:
  tokens    prompt and output so far
  pending   sampled by steps in flight: they exist on the worker, their ids are not known here yet
  computed  keys and values written by steps answered or in flight
  durable   keys and values written by answered steps
  limit     tokens at which the request ends
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from trivet_proto.errors import TrivetError
from trivet_proto.v1 import types_pb2

from trivet_scheduler.kv.hashing import HashKeys

GROWTH = 2


class Status(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    WAITING_FOR_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def is_finished(self) -> bool:
        return self in FINISH_REASONS


FINISH_REASONS = {
    Status.FINISHED_STOPPED: types_pb2.FINISH_REASON_STOP,
    Status.FINISHED_LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Status.FINISHED_ABORTED: types_pb2.FINISH_REASON_ABORT,
    Status.FINISHED_ERROR: types_pb2.FINISH_REASON_ERROR,
}


class RequestTable:
    """The hot counters, by slot. Rows of ended requests are taken again."""

    COLUMNS: ClassVar = ("tokens", "pending", "computed", "durable", "limit", "blocks", "prompt")

    def __init__(self, capacity: int = 64) -> None:
        self.tokens = np.zeros(capacity, dtype=np.int32)
        self.pending = np.zeros(capacity, dtype=np.int32)
        self.computed = np.zeros(capacity, dtype=np.int32)
        self.durable = np.zeros(capacity, dtype=np.int32)
        self.limit = np.zeros(capacity, dtype=np.int32)
        self.blocks = np.zeros(capacity, dtype=np.int32)  # length of the block table
        self.prompt = np.zeros(capacity, dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def take_slot(self) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for name in self.COLUMNS:
            getattr(self, name)[slot] = 0
        return slot

    def free_slot(self, slot: int) -> None:
        self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.tokens)
        for name in self.COLUMNS:
            column: NDArray[np.int32] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(old * (GROWTH - 1), dtype=np.int32)]))
        self._free = list(range(old * GROWTH - 1, old - 1, -1))


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What was asked, once per prompt: shared by its children and never changed."""

    uid: bytes
    request_id: str
    prompt: NDArray[np.int32]
    sampling: types_pb2.SamplingParams
    keys: HashKeys
    num_children: int
    stop_ids: frozenset[int]  # end tokens of the model included, unless ignored
    min_tokens: int
    read_prefix_cache: bool
    priority: int = 0
    deadline: float | None = None  # on the scheduler's monotonic clock


@dataclass(frozen=True, slots=True)
class Resume:
    """What a child had already when another scheduler lost it: its output counts as output here, and nothing of this is said again."""

    output: Sequence[int] = ()
    done: bool = False  # it needs nothing more
    prompt_logprobs_reported: bool = False
    cached_tokens_reported: bool = False
    timing_reported: bool = False


NOTHING_DONE = Resume()


@dataclass(slots=True, eq=False)
class Request:
    """One child. `owner` is whoever asked (a session); `handle` is its name there."""

    spec: RequestSpec
    owner: object
    handle: int
    child: int
    seed: int
    table: RequestTable
    slot: int
    arrival: int  # order of admission to the queue, kept over preemptions
    arrived_at: float
    status: Status = Status.WAITING
    output: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    chains: dict[int, list[bytes]] = field(default_factory=dict)  # block size → prefix hashes of the full blocks known so far
    sibling: "Request | None" = None  # the child that computes the shared blocks
    worker_handle: int = 0  # of this life on a worker; 0: none
    last_step: int = 0  # the last step that named it
    steps_in_flight: int = 0
    named_blocks: int = 0  # leading blocks whose hashes are in the cache
    cached_tokens: int | None = None  # of the first admission
    cached_reported: bool = False
    prompt_logprobs_done: int = 1  # prompt positions below this are delivered (position 0 has none)
    timing_reported: bool = False
    failures: int = 0  # failed steps in a row that held it
    scheduled_at: float | None = None
    first_token_at: float | None = None
    left_since: float | None = None  # when a replica first left it to a better one; None: none did
    stop_token: int | None = None
    error: TrivetError | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.table.tokens[self.slot])

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.child == 0 and self.spec.sampling.HasField("prompt_logprobs") and self.prompt_logprobs_done < self.num_prompt

    @property
    def samples_nothing(self) -> bool:
        """A limit of no output tokens: the prompt runs for its logprobs alone."""
        return int(self.table.limit[self.slot]) <= self.num_prompt

    def ids_from(self, start: int) -> NDArray[np.int32]:
        """Prompt and output from a position on; costs what it returns, not what came before."""
        num_prompt = len(self.spec.prompt)
        if start >= num_prompt:
            return np.asarray(self.output[start - num_prompt :], dtype=np.int32)
        return np.concatenate([self.spec.prompt[start:], np.asarray(self.output, dtype=np.int32)])

    def all_ids(self) -> NDArray[np.int32]:
        """Prompt, then output so far."""
        return np.concatenate([self.spec.prompt, np.asarray(self.output, dtype=np.int32)]) if self.output else self.spec.prompt


def end_after(request: Request, count: int, limit: int) -> Status | None:
    """How a request ends with its `count`-th output token, if it does; remembers the stop token. `limit` as in the table."""
    spec, token = request.spec, request.output[count - 1]
    if token in spec.stop_ids and count > spec.min_tokens:
        request.stop_token = token
        return Status.FINISHED_STOPPED
    return Status.FINISHED_LENGTH if len(spec.prompt) + count >= limit else None
