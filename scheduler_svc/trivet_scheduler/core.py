"""The heart: which tokens run in the next step of a replica, and what a step's answer means.

There is no prefill phase and no decode phase. Each request has tokens computed and tokens wanted; a step moves the first toward the
second. Chunked prefill, prefix hits and recomputation after a preemption all follow from that.

Pure and synchronous: no I/O, no clock but the one given, the same under the services, the tests and a simulator. `schedule` builds
step k + 1 while step k is in flight: a sampled token whose id is not known yet counts as *pending*. What changes for those who asked
is left in `take_deltas`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from trivet_chassis.clock import Clock
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.sampling import child_seed

from trivet_scheduler.kv.coordinator import PrefixHit
from trivet_scheduler.kv.hashing import HashKeys, extend_chain
from trivet_scheduler.plan import Delta, Flight, NewWork, StepOutcome, StepPlan, StepStatus, cut_logprobs
from trivet_scheduler.queues import Policy, WaitingQueue
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, RequestSpec, RequestTable, Status

FLAG_NON_FINITE, FLAG_ALL_MASKED = 1, 2
MOST_FAILURES = 4  # failed steps in a row after which a request is given up
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What the operator decides; the rest are the workers' own limits."""

    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: no such limit
    watermark: float = 0.01  # share of the blocks that admitting a request leaves free while others run
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4_000_000
    steps_in_flight: int = 2


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    steps: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[Status, int] = field(default_factory=dict)


class Scheduler:
    """All requests of all replicas. One waiting queue, a running list per replica."""

    def __init__(self, settings: CoreSettings, clock: Clock) -> None:
        self.settings = settings
        self.totals = Totals()
        self.table = RequestTable()
        self.requests: set[Request] = set()
        self.waiting = WaitingQueue(settings.policy)
        self.replicas: list[Replica] = []
        self.paused = False
        self._clock = clock
        self._deltas: list[Delta] = []
        self._arrivals = 0
        self._children: dict[Request, list[Request]] = {}  # first child → those who wait for it

    # ---- replicas ----

    def attach(self, replica: Replica) -> None:
        self.replicas.append(replica)

    def detach(self, replica: Replica) -> None:
        """The replica is lost: what ran there goes back to the queue, to the places that arrival gives, and its answers count no more."""
        self.replicas.remove(replica)
        for flight in replica.flights:
            for request in flight.requests:
                request.steps_in_flight = 0
                self.waiting.unblock(request)
        replica.flights.clear()
        for request in replica.running:
            self._reset(request)
            request.status = Status.PREEMPTED
            request.block_table = []
            self.waiting.push(request)
        replica.running.clear()

    def replica_of(self, request: Request) -> Replica | None:
        return next((replica for replica in self.replicas if request in replica.running), None)

    @property
    def num_running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas)

    @property
    def capacity_tokens(self) -> int:
        """What one request can hold at most, on the largest replica; 0 when there is none."""
        return max((replica.kv.capacity_tokens for replica in self.replicas), default=0)

    # ---- requests ----

    def add(self, spec: RequestSpec, owner: object, handles: Sequence[int], seed: int, max_model_len: int) -> list[Request]:
        """Admit the children of a prompt, all or none. Raises INVALID_ARGUMENT for what can never run, OVERLOADED for what cannot wait."""
        self._check_admission(spec, max_model_len)
        now = self._clock.monotonic()
        children = []
        for index, handle in enumerate(handles):
            slot = self.table.take_slot()
            self.table.tokens[slot] = self.table.prompt[slot] = len(spec.prompt)
            self.table.limit[slot] = self._limit(spec, max_model_len)
            self._arrivals += 1
            children.append(
                Request(spec, owner, handle, index, child_seed(seed, index), self.table, slot, arrival=self._arrivals, arrived_at=now)
            )
        first, *others = children
        for request in children:
            self.requests.add(request)
            self.totals.prompt_tokens += len(spec.prompt)
            if request.samples_nothing and not request.wants_prompt_logprobs:
                request.cached_tokens = 0
                self._finish(request, Status.FINISHED_LENGTH)
                continue
            self.waiting.push(request)
            if request is not first and first in self.waiting:
                request.sibling = first
        if any(request.sibling for request in others):
            self._children[first] = others
        return children

    def stop(self, request: Request) -> None:
        """Its text is complete: the frontend found a stop string."""
        if not request.status.is_finished:
            self._finish(request, Status.FINISHED_STOPPED)

    def abort(self, request: Request) -> None:
        if not request.status.is_finished:
            self._finish(request, Status.FINISHED_ABORTED)

    def fail(self, request: Request, error: TrivetError, delta: Delta | None = None) -> None:
        """End one request with an error of its own."""
        if not request.status.is_finished:
            request.error = error
            self._finish(request, Status.FINISHED_ERROR, delta)

    def expire(self) -> None:
        """End the requests whose time has run out, waiting or running."""
        now = self._clock.monotonic()
        late = [request for request in self.requests if request.spec.deadline is not None and request.spec.deadline <= now]
        for request in late:
            self.fail(request, TrivetError(ErrorKind.DEADLINE_EXCEEDED, "the request's time ran out before it was finished"))

    def take_deltas(self) -> list[Delta]:
        """What is new since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reset_prefix_cache(self, *, preempt_running: bool) -> int:
        """Forget all cached prefixes; what runs keeps its own blocks unless it is preempted first."""
        for replica in self.replicas if preempt_running else ():
            for request in list(replica.running):
                self._preempt(replica, request)
        return sum(replica.kv.reset() for replica in self.replicas)

    # ---- schedule ----

    def schedule(self, replica: Replica) -> StepPlan | None:
        """The next step of a replica; None when there is nothing to run or enough is in flight."""
        if len(replica.flights) >= min(self.settings.steps_in_flight, replica.limits.steps_in_flight):
            return None
        preemptions = self.totals.preemptions
        known, counts, new_blocks = self._schedule_running(replica)
        budget = replica.token_budget - int(counts.sum())
        new: list[tuple[Request, int]] = []
        if self.totals.preemptions == preemptions and not self.paused:
            new = self._schedule_waiting(replica, budget)
        if not known and not new:
            return None
        return self._depart(replica, known, counts, new_blocks, new)

    def _schedule_running(self, replica: Replica) -> tuple[list[Request], NDArray[np.int32], list[list[int]]]:
        """Rows of running requests with something to run: the requests, their token counts, their new blocks."""
        if not replica.running:
            return [], np.zeros(0, dtype=np.int32), []
        table, slots = self.table, replica.slots
        tokens, computed = table.tokens[slots], table.computed[slots]
        known = tokens + table.pending[slots]
        # At its limit with tokens in flight a request has nothing more to run.
        counts = np.where((known >= table.limit[slots]) & (computed >= tokens), 0, known - computed)
        counts = self._within_budget(counts, replica.token_budget)
        block_size = replica.kv.block_size
        needed = np.maximum(-(-(computed + counts) // block_size) - table.blocks[slots], 0)
        needed[counts == 0] = 0
        running = list(replica.running)
        fresh: dict[Request, list[int]] = {}
        if int(needed.sum()) <= replica.kv.pool.num_free:
            for index in np.flatnonzero(needed):
                self._grow(replica, running[index], int(needed[index]), fresh)
        else:
            kept = self._grow_by_preempting(replica, running, counts, needed, fresh)
            running = [running[index] for index in kept]
            counts = counts[kept]
        rows = np.flatnonzero(counts)
        requests = [running[index] for index in rows]
        return requests, counts[rows].astype(np.int32), [fresh.get(request, []) for request in requests]

    def _within_budget(self, counts: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
        """Clamp to the long-prefill threshold and the token budget. Decodes come first, so that no prefill can stall a running stream."""
        threshold = self.settings.long_prefill_token_threshold
        if threshold and len(counts) > 1:
            counts = np.minimum(counts, threshold)
        if int(counts.sum()) <= budget:
            return counts
        order = np.argsort(counts > 1, kind="stable")
        ordered = counts[order]
        before = np.cumsum(ordered) - ordered
        clamped = np.empty_like(counts)
        clamped[order] = np.clip(budget - before, 0, ordered)
        return clamped

    def _grow(self, replica: Replica, request: Request, count: int, fresh: dict[Request, list[int]]) -> None:
        blocks = replica.kv.grow(request.block_table, count)
        assert blocks is not None, "counted before"
        self.table.blocks[request.slot] += count
        fresh[request] = blocks

    def _grow_by_preempting(
        self,
        replica: Replica,
        running: list[Request],
        counts: NDArray[np.int32],
        needed: NDArray[np.int32],
        fresh: dict[Request, list[int]],
    ) -> NDArray[np.int64]:
        """Give blocks in the order of rank, preempting from the other end. Returns the indices of those who still run."""
        order = sorted(range(len(running)), key=lambda index: self.waiting.rank(running[index]))
        victims = list(reversed(order))
        alive = dict.fromkeys(range(len(running)))
        for index in order:
            if index not in alive or counts[index] == 0:
                continue
            pool = replica.kv.pool
            while pool.num_free + replica.blocks_coming < needed[index]:
                victim = victims.pop(0)
                while victim not in alive:
                    victim = victims.pop(0)
                # Whatever this step gave the victim goes back with its table.
                fresh.pop(running[victim], None)
                counts[victim] = 0
                del alive[victim]
                self._preempt(replica, running[victim])
                if victim == index:
                    break
            if index not in alive:
                continue
            if pool.num_free < needed[index]:
                counts[index] = 0  # enough is coming: it waits for a step's answer
            elif needed[index]:
                self._grow(replica, running[index], int(needed[index]), fresh)
        return np.fromiter(alive, dtype=np.int64, count=len(alive))

    def _schedule_waiting(self, replica: Replica, budget: int) -> list[tuple[Request, int]]:
        """Admit requests while tokens, blocks and places last; in strict order, so that nobody is passed over for being large."""
        admitted: list[tuple[Request, int]] = []
        passed: list[Request] = []
        most = replica.limits.max_num_seqs
        if self.settings.max_num_active_seqs is not None:
            most = min(most, self.settings.max_num_active_seqs)
        reserved = self._blocks_reserved(replica)
        while budget > 0 and len(replica.running) < most:
            request = self.waiting.peek()
            if request is None:
                break
            if self._is_blocked(replica, request):
                self.waiting.block(request)
                continue
            if request.num_tokens > self.capacity_tokens:  # it came before any replica had said its size
                self.fail(request, self._too_long(request.num_tokens))
                continue
            hit = self._lookup(replica, request)
            if len(self.replicas) > 1 and self._best_replica(request) is not replica:
                self.waiting.remove(request)
                passed.append(request)
                continue
            count = self._admit(replica, request, hit, budget, reserved)
            if count == 0:
                break
            reserved += replica.kv.blocks_for(request.num_tokens) - len(request.block_table)
            budget -= count
            admitted.append((request, count))
        for request in passed:
            self.waiting.push(request)
        return admitted

    def _admit(self, replica: Replica, request: Request, hit: PrefixHit, budget: int, reserved: int) -> int:
        """Make it run; returns the tokens of its first step, 0 when the blocks do not suffice."""
        kv, slot = replica.kv, request.slot
        wanted = request.num_tokens - hit.num_tokens
        count = min(wanted, budget)
        threshold = self.settings.long_prefill_token_threshold
        if threshold and replica.running:
            count = min(count, threshold)
        total = kv.blocks_for(hit.num_tokens + count)
        # The whole sequence must fit beside what the prefills under way still need; the watermark counts only when others run.
        spare = kv.blocks_for(request.num_tokens) - total + reserved
        if replica.running:
            spare += int(self.settings.watermark * kv.pool.capacity)
        blocks = kv.allocate(hit, total, spare=spare)
        if blocks is None:
            return 0
        self.waiting.remove(request)
        request.block_table = blocks
        request.named_blocks = len(hit.blocks)
        self.table.blocks[slot] = total
        self.table.computed[slot] = self.table.durable[slot] = hit.num_tokens
        self.table.limit[slot] = min(self.table.limit[slot], kv.capacity_tokens + 1)
        request.status = Status.RUNNING
        request.worker_handle = replica.next_handle()
        if request.cached_tokens is None:
            request.cached_tokens = hit.num_tokens
            self.totals.prefix_queries += request.num_tokens
            self.totals.prefix_hits += hit.num_tokens
        replica.add_running(request)
        return count

    def _depart(
        self,
        replica: Replica,
        known: list[Request],
        known_counts: NDArray[np.int32],
        new_blocks: list[list[int]],
        new: list[tuple[Request, int]],
    ) -> StepPlan:
        """Move the counters as if the step were done, and write down what it does."""
        table, now = self.table, self._clock.monotonic()
        requests = [request for request, _ in new] + known
        counts = np.concatenate([np.array([count for _, count in new], dtype=np.int32), known_counts])
        slots = np.fromiter((request.slot for request in requests), dtype=np.int64, count=len(requests))
        computed = table.computed[slots]
        after = computed + counts
        samples = (after == table.tokens[slots] + table.pending[slots]) & (table.limit[slots] > table.prompt[slots])
        number = replica.next_step()
        work = [
            NewWork(request, request.worker_handle, request.all_ids(), np.array(request.block_table, dtype=np.int32), int(done), count)
            for (request, count), done in zip(new, computed, strict=False)
        ]
        table.computed[slots] = after
        table.pending[slots] += samples
        for request in requests:
            request.steps_in_flight += 1
            request.last_step = number
            if request.scheduled_at is None:
                request.scheduled_at = now
        handles = [request.worker_handle for request in requests]
        num_tokens = int(counts.sum())
        replica.flights.append(Flight(number, requests, handles, counts, samples, now, num_tokens))
        finished, replica.finished_handles = replica.finished_handles, []
        zero, replica.blocks_to_zero = replica.blocks_to_zero, []
        resync, replica.resync = replica.resync, None
        self.totals.steps += 1
        return StepPlan(
            number=number,
            new=work,
            known_handles=np.array(handles[len(new) :], dtype=np.int32),
            known_scheduled=known_counts,
            known_computed=computed[len(new) :],
            new_blocks=np.array([block for blocks in new_blocks for block in blocks], dtype=np.int32),
            new_block_counts=np.array([len(blocks) for blocks in new_blocks], dtype=np.int32),
            finished_handles=finished,
            blocks_to_zero=zero,
            resync=resync,
            num_tokens=num_tokens,
        )

    # ---- update ----

    def update(self, replica: Replica, outcome: StepOutcome) -> None:
        """Take in a step's answer. Raises ABORTED, and changes nothing, when it answers no step in flight."""
        flight = replica.flights[0] if replica.flights else None
        if flight is None or flight.number != outcome.number:
            expected = "none is in flight" if flight is None else f"step {flight.number} is next"
            raise TrivetError(ErrorKind.ABORTED, f"an answer to step {outcome.number}, but {expected}")
        if outcome.status is StepStatus.DONE and outcome.handles.tolist() != flight.handles:
            raise TrivetError(ErrorKind.ABORTED, f"the answer to step {outcome.number} names other requests than the step did")
        replica.flights.popleft()
        for request in flight.requests:
            request.steps_in_flight -= 1
        if outcome.status is StepStatus.DONE:
            self._take_in(replica, flight, outcome)
            replica.token_budget = min(replica.token_budget * 2, replica.limits.max_num_batched_tokens)
        elif outcome.status is StepStatus.FAILED:
            self._undo(replica, flight, outcome.error)
        replica.free_answered(outcome.number)
        for request in flight.requests:
            if request.status is Status.PREEMPTED and not request.steps_in_flight:
                self.waiting.unblock(request)

    def _take_in(self, replica: Replica, flight: Flight, outcome: StepOutcome) -> None:
        deltas: dict[Request, Delta] = {}
        by_handle = dict(zip(flight.handles, flight.requests, strict=True))
        for handle, first, logprobs in outcome.prompt_logprobs:
            self._take_prompt_logprobs(by_handle.get(handle), first, logprobs, deltas)
        row_logprobs = set(outcome.logprob_rows.tolist())
        self._make_durable(replica, flight)
        table, now = self.table, self._clock.monotonic()
        token_ids: list[int] = outcome.token_ids.tolist()
        token_counts: list[int] = outcome.token_counts.tolist()
        flags: list[int] = outcome.flags.tolist() if outcome.flags.size else [0] * len(flight.requests)
        at = logprobs_at = 0
        for row, request in enumerate(flight.requests):
            count = token_counts[row]
            sampled = token_ids[at : at + count]
            at += count
            logprobs_from = logprobs_at
            logprobs_at += count if row in row_logprobs else 0
            if request.status.is_finished:
                continue  # overrun: it ended while this step ran
            request.failures = 0
            if flags[row]:
                self._end_broken(replica, request, flags[row], deltas.setdefault(request, Delta(request)))
                continue
            if sampled:
                delta = deltas.get(request) or deltas.setdefault(request, Delta(request))
                if request.first_token_at is None:
                    request.first_token_at = now
                    delta.timing = _timing(request)
                taken = self._append(request, sampled, delta)
                if row in row_logprobs and outcome.logprobs is not None:
                    delta.logprobs = cut_logprobs(outcome.logprobs, logprobs_from, logprobs_from + taken)
            elif request.samples_nothing and int(table.durable[request.slot]) >= request.num_prompt:
                self._finish(request, Status.FINISHED_LENGTH, deltas.setdefault(request, Delta(request)))
        for request, delta in deltas.items():
            if not request.cached_reported:
                delta.cached_tokens, request.cached_reported = request.cached_tokens, True
            self._deltas.append(delta)

    def _append(self, request: Request, sampled: list[int], delta: Delta) -> int:
        """Add sampled tokens up to the one that ends the request; returns how many counted."""
        spec, output = request.spec, request.output
        num_prompt, limit = len(spec.prompt), int(self.table.limit[request.slot])
        finish, taken = None, 0
        for token in sampled:
            output.append(token)
            taken += 1
            if token in spec.stop_ids and len(output) > spec.min_tokens:
                request.stop_token, finish = token, Status.FINISHED_STOPPED
                break
            if num_prompt + len(output) >= limit:
                finish = Status.FINISHED_LENGTH
                break
        delta.token_ids.extend(sampled[:taken])
        self.table.tokens[request.slot] = num_prompt + len(output)
        self.totals.generation_tokens += taken
        if finish is not None:
            self._finish(request, finish, delta)
        return taken

    def _make_durable(self, replica: Replica, flight: Flight) -> None:
        """The keys and values of a step's tokens are written for good: full blocks can now be found by others."""
        # A row whose request has ended or been preempted meanwhile belongs to a life that is over.
        rows = [row for row, request in enumerate(flight.requests) if request.worker_handle == flight.handles[row]]
        slots = np.fromiter((flight.requests[row].slot for row in rows), dtype=np.int64, count=len(rows))
        self.table.pending[slots] -= flight.samples[rows]
        durable = self.table.durable[slots] + flight.counts[rows]
        self.table.durable[slots] = durable
        full: list[int] = (durable // replica.kv.block_size).tolist()
        for row, num_full in zip(rows, full, strict=True):
            request = flight.requests[row]
            if num_full > request.named_blocks:
                self._name_blocks(replica, request, num_full)
            if request in self._children and num_full * replica.kv.block_size >= self._shared_tokens(replica, request):
                self._release_children(request)

    def _name_blocks(self, replica: Replica, request: Request, full: int) -> None:
        self._extend_chain(replica, request)
        # A token that is still pending cannot be named: its block waits for the next answer.
        full = min(full, len(request.chain))
        replica.kv.name(request.block_table, request.chain, request.named_blocks, full)
        request.named_blocks = max(full, request.named_blocks)

    def _take_prompt_logprobs(self, request: Request | None, first: int, logprobs: object, deltas: dict[Request, Delta]) -> None:
        if request is None or request.status.is_finished:
            return
        count = len(logprobs.counts) // 4  # type: ignore[attr-defined]
        if first != request.prompt_logprobs_done:
            return  # delivered already, by a life before a preemption
        request.prompt_logprobs_done = first + count
        deltas.setdefault(request, Delta(request)).prompt_logprobs.append((first, logprobs))  # type: ignore[arg-type]

    def _end_broken(self, replica: Replica, request: Request, flags: int, delta: Delta) -> None:
        if flags & FLAG_NON_FINITE:
            error = TrivetError(ErrorKind.NON_FINITE, "the model's logits for this request were not finite")
            for block in request.block_table:
                replica.kv.pool.unname(block)
            # Zero times NaN is NaN: whoever takes these blocks next must not see what is in them.
            replica.blocks_to_zero.extend(request.block_table)
        else:
            error = invalid("logit_bias, allowed_token_ids, bad_words and min_tokens together leave no token that could be sampled")
        self.fail(request, error, delta)

    def _undo(self, replica: Replica, failed: Flight, error: TrivetError | None) -> None:
        """A step failed: it and those behind it, which the worker skips, have no effect. Retry with half as many tokens."""
        self.totals.failed_steps += 1
        replica.resync = failed.number
        replica.token_budget = max(1, min(replica.token_budget, failed.num_tokens) // 2)
        for flight in (failed, *replica.flights):
            if flight.undone:
                continue
            flight.undone = True
            for row, request in enumerate(flight.requests):
                if not request.status.is_finished and request.worker_handle == flight.handles[row]:
                    self.table.computed[request.slot] -= flight.counts[row]
                    self.table.pending[request.slot] -= flight.samples[row]
        for request in failed.requests:
            request.failures += 1
            if request.failures >= MOST_FAILURES and (len(failed.requests) == 1 or request.failures >= 4 * MOST_FAILURES):
                self.fail(request, error or TrivetError(ErrorKind.INTERNAL, "the model's steps for this request failed"))

    # ---- ends, preemption, waiting ----

    def _finish(self, request: Request, status: Status, delta: Delta | None = None) -> None:
        """The one way out: exactly one delta carries the finish."""
        replica = self.replica_of(request) if request.status is Status.RUNNING else None
        if replica is not None:
            replica.remove_running(request)
            replica.finished_handles.append(request.worker_handle)
            replica.free_when_answered(request)
        self.waiting.remove(request)
        self._release_children(request)
        request.status = status
        request.worker_handle = 0
        self.table.free_slot(request.slot)
        self.requests.discard(request)
        self.totals.finished[status] = self.totals.finished.get(status, 0) + 1
        if delta is None:
            delta = Delta(request)
            self._deltas.append(delta)
        delta.finish = status

    def _preempt(self, replica: Replica, request: Request) -> None:
        """Take its blocks; it computes again when its turn comes, with the tokens it has."""
        self.totals.preemptions += 1
        replica.remove_running(request)
        replica.finished_handles.append(request.worker_handle)
        replica.free_when_answered(request)
        self._reset(request)
        request.status = Status.PREEMPTED
        self.waiting.push(request)

    def _reset(self, request: Request) -> None:
        slot = request.slot
        self.table.computed[slot] = self.table.durable[slot] = self.table.pending[slot] = self.table.blocks[slot] = 0
        request.named_blocks = 0
        request.worker_handle = 0

    def _is_blocked(self, replica: Replica, request: Request) -> bool:
        if request.steps_in_flight:
            return True  # tokens of its former life are on their way: they come first
        sibling = request.sibling
        return sibling is not None and sibling in self._children and self._shared_tokens(replica, sibling) > 0

    def _release_children(self, first: Request) -> None:
        for child in self._children.pop(first, ()):
            self.waiting.unblock(child)

    def _shared_tokens(self, replica: Replica, request: Request) -> int:
        """Full blocks of the prompt that its children can take over."""
        return (request.num_prompt - 1) // replica.kv.block_size * replica.kv.block_size

    def _lookup(self, replica: Replica, request: Request) -> PrefixHit:
        if request.wants_prompt_logprobs or not request.spec.read_prefix_cache:
            return PrefixHit()
        self._extend_chain(replica, request)
        return replica.kv.lookup(request.chain, request.num_tokens)

    def _extend_chain(self, replica: Replica, request: Request) -> None:
        keys = request.spec.keys
        if not self.settings.enable_prefix_caching:
            # Children of one prompt still share; nobody else can know this salt.
            keys = HashKeys(keys.adapter, keys.salt + request.spec.uid)
        block_size = replica.kv.block_size
        extend_chain(request.chain, request.ids_from(len(request.chain) * block_size), block_size, keys)

    def _best_replica(self, request: Request) -> Replica:
        """Where the resulting load (prompt tokens still to run there, plus those this request could not reuse) is least."""

        def load(replica: Replica) -> int:
            slots = replica.slots
            pending = int(np.maximum(self.table.tokens[slots] - self.table.computed[slots], 0).sum()) + len(slots)
            return pending + request.num_tokens - self._lookup(replica, request).num_tokens

        open_replicas = [
            replica
            for replica in self.replicas
            if len(replica.running) < replica.limits.max_num_seqs and request.num_tokens <= replica.kv.capacity_tokens
        ]
        return min(open_replicas or self.replicas, key=load)

    def _blocks_reserved(self, replica: Replica) -> int:
        """Blocks that the prefills under way still need."""
        slots = replica.slots
        if not len(slots):
            return 0
        whole = -(-self.table.tokens[slots] // replica.kv.block_size)
        return int(np.maximum(whole - self.table.blocks[slots], 0).sum())

    # ---- admission ----

    def _check_admission(self, spec: RequestSpec, max_model_len: int) -> None:
        prompt = len(spec.prompt)
        wanted = spec.sampling.max_tokens if spec.sampling.HasField("max_tokens") else 1
        if prompt == 0:
            raise invalid("the prompt is empty", "prompt")
        if prompt + max(wanted, 1) > max_model_len and not (wanted == 0 and prompt <= max_model_len):
            raise invalid(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}, together more than the context of {max_model_len} tokens",
                "max_tokens",
            )
        if self.replicas and prompt > self.capacity_tokens:
            raise self._too_long(prompt)
        waiting = len(self.waiting)
        if waiting + spec.num_children > self.settings.max_waiting_requests:
            raise self._overloaded(f"{waiting} requests wait already, at most {self.settings.max_waiting_requests} may")
        if waiting and self.waiting.num_uncached_tokens + prompt * spec.num_children > self.settings.max_waiting_tokens:
            raise self._overloaded(f"the prompts that wait already and this one exceed {self.settings.max_waiting_tokens} tokens")

    def _too_long(self, num_tokens: int) -> TrivetError:
        blocks = -(-num_tokens // self.replicas[0].kv.block_size)
        return invalid(
            f"the prompt of {num_tokens} tokens needs {blocks} KV blocks; the cache holds {self.capacity_tokens} tokens. "
            "Shorten it, or start the worker with more KV blocks",
            "prompt",
        )

    def _overloaded(self, message: str) -> TrivetError:
        return TrivetError(ErrorKind.OVERLOADED, message, retry_after_ms=RETRY_AFTER_MS)

    def _limit(self, spec: RequestSpec, max_model_len: int) -> int:
        """Tokens at which it ends. A pool too small for the whole of it ends it with `length` at the pool's capacity."""
        prompt = len(spec.prompt)
        limit = max_model_len
        if spec.sampling.HasField("max_tokens"):
            limit = min(limit, prompt + spec.sampling.max_tokens)
        if self.capacity_tokens:
            limit = min(limit, self.capacity_tokens + 1)  # the last token's keys and values are never needed
        return limit


def _timing(request: Request) -> tuple[int, int]:
    scheduled, first = request.scheduled_at or request.arrived_at, request.first_token_at or 0.0
    return int((scheduled - request.arrived_at) * 1e6), int((first - scheduled) * 1e6)
