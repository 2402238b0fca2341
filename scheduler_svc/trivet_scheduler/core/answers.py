"""A step's answer: what it means for each of its rows, and how a step that failed is taken back.

Only a step that is done makes anything durable. Its rows may have ended or been preempted meanwhile: who has ended gets nothing more, who
was preempted still gets the token.
"""

from itertools import accumulate, pairwise

import numpy as np
from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.placement import capacity_tokens
from trivet_scheduler.core.prefixes import Prefixes
from trivet_scheduler.plan import Delta, Flight, StepOutcome, StepStatus, cut_logprobs
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request, Status, end_after

FLAG_NON_FINITE, FLAG_ALL_MASKED, FLAG_PROCESSOR_FAILED = 1, 2, 4
MOST_FAILURES = 4  # failed steps in a row after which a request is given up


class Answers:
    """Applies answers to the book and the replicas. Owns nothing."""

    def __init__(self, book: RequestBook, prefixes: Prefixes, replicas: list[Replica]) -> None:
        self._book = book
        self._prefixes = prefixes
        self._replicas = replicas

    # ---- does it answer the step? ----

    def check(self, replica: Replica, outcome: StepOutcome) -> Flight:
        """The flight that it answers. Raises ABORTED, with nothing changed, when it answers none or does not fit it."""
        flight = replica.flights[0] if replica.flights else None
        if flight is None or flight.number != outcome.number:
            expected = "none is in flight" if flight is None else f"step {flight.number} is next"
            raise _refused(outcome, expected)
        if outcome.iteration != flight.answered or not (outcome.is_last or (outcome.status is StepStatus.DONE and flight.left > 1)):
            raise _refused(outcome, f"iteration {outcome.iteration} of {flight.iterations}, {flight.answered} of which are answered")
        if outcome.status is StepStatus.DONE:
            self._check_rows(flight, outcome)
        # Behind a failed step nothing runs until the worker is told that the failure is known here.
        if outcome.status is (StepStatus.DONE if flight.undone else StepStatus.SKIPPED):
            before = "a step before it failed" if flight.undone else "no step before it failed"
            raise _refused(outcome, f"its status is {outcome.status.name} though {before}")
        return flight

    def _check_rows(self, flight: Flight, outcome: StepOutcome) -> None:
        if outcome.handles != flight.handles:
            raise _refused(outcome, "it names other requests than the step did")
        rows = len(flight.handles)
        counts, flags = outcome.token_counts, outcome.flags
        if len(counts) != rows or len(flags) not in (0, rows) or min(counts, default=0) < 0 or sum(counts) != len(outcome.token_ids):
            raise _refused(outcome, "its arrays do not fit the rows of the step")
        for row, (count, samples) in enumerate(zip(counts, flight.samples.tolist(), strict=True)):
            if count == samples or (flags and flags[row]) or flight.requests[row] not in self._book.alive:
                continue
            raise _refused(outcome, f"request {flight.handles[row]} has {count} tokens in it instead of {int(samples)}")
        self._check_logprobs(outcome, rows)

    def _check_logprobs(self, outcome: StepOutcome, rows: int) -> None:
        named, logprobs = outcome.logprob_rows, outcome.logprobs
        if not named and logprobs is None:
            return
        in_order = bool(named) and named[0] >= 0 and named[-1] < rows and all(row < later for row, later in pairwise(named))
        if logprobs is None or not in_order:
            raise _refused(outcome, "its rows with logprobs are not rows of the step in their order, or the logprobs are missing")
        tokens, entries = sum(outcome.token_counts[row] for row in named), int(logprobs.counts.sum())
        if len(logprobs.counts) != tokens or len(logprobs.ranks) != tokens or {len(logprobs.token_ids), len(logprobs.values)} != {entries}:
            raise _refused(outcome, "its logprobs do not fit its tokens")

    # ---- done ----

    def take_in(self, replica: Replica, flight: Flight, outcome: StepOutcome) -> None:
        """The step is done: what it wrote is durable, its tokens are the requests'."""
        book, table, requests = self._book, self._book.table, flight.requests
        deltas: dict[Request, Delta] = {}
        self._take_prompt_logprobs(flight, outcome, deltas)
        flight.answered += 1
        self._make_durable(replica, flight, left_out=flight.left if outcome.is_last else 0)
        now = book.clock.monotonic()
        limits: list[int] = table.limit[flight.slots].tolist()
        flags = outcome.flags if any(outcome.flags) else b""
        logprobs_from = _logprob_starts(outcome)
        at = 0
        for row, (request, count) in enumerate(zip(requests, outcome.token_counts, strict=True)):
            sampled = outcome.token_ids[at : at + count]
            at += count
            if flags and flags[row] & FLAG_NON_FINITE:
                replica.distrust(request, flight.handles[row])
            if request not in book.alive:
                continue  # overrun: it ended while this step ran
            request.failures = 0
            if flags and flags[row]:
                book.fail(request, _broken(flags[row]), deltas.setdefault(request, Delta(request)))
            elif sampled:
                delta = deltas[request] if request in deltas else deltas.setdefault(request, Delta(request))
                if request.first_token_at is None:
                    request.first_token_at = now
                    delta.timing = None if request.timing_reported else _timing(request)
                taken = self._append(replica, request, sampled, limits[row], delta)
                if row in logprobs_from and outcome.logprobs is not None:
                    delta.logprobs = cut_logprobs(outcome.logprobs, logprobs_from[row], logprobs_from[row] + taken)
            elif request.samples_nothing and int(table.durable[request.slot]) >= request.num_prompt:
                book.finish(request, Status.FINISHED_LENGTH, deltas.setdefault(request, Delta(request)))
        for request, delta in deltas.items():
            if not request.cached_reported:
                delta.cached_tokens, request.cached_reported = request.cached_tokens, True
            book.report(delta)

    def _append(self, replica: Replica, request: Request, sampled: list[int], limit: int, delta: Delta) -> int:
        """Add sampled tokens up to the one that ends the request; returns how many counted."""
        book, output = self._book, request.output
        finish = None
        for token in sampled:
            output.append(token)
            delta.token_ids.append(token)
            finish = end_after(request, len(output), limit)
            if finish is not None:
                break
        taken = len(delta.token_ids)
        num_tokens = len(request.spec.prompt) + len(output)
        book.table.tokens[request.slot] = num_tokens
        book.totals.generation_tokens += taken
        if finish is None and num_tokens > replica.kv.capacity_tokens and num_tokens > capacity_tokens(self._replicas):
            finish = Status.FINISHED_LENGTH  # no cache has room for this token's keys and values, so it is the last
        if finish is not None:
            book.finish(request, finish, delta)
        return taken

    def _make_durable(self, replica: Replica, flight: Flight, *, left_out: int) -> None:
        """The keys and values of a step's tokens are written for good: full blocks can now be found by others.

        `left_out`: iterations that the step was given and did not run.
        """
        book, table, requests, block_size = self._book, self._book.table, flight.requests, replica.kv.block_size
        slots, samples, counts = flight.slots, flight.samples, flight.counts
        if [request.worker_handle for request in requests] != flight.handles:
            # A row whose request has ended or been preempted meanwhile belongs to a life that is over.
            rows = [row for row, request in enumerate(requests) if request.worker_handle == flight.handles[row]]
            requests, slots, samples, counts = [requests[row] for row in rows], slots[rows], samples[rows], counts[rows]
        table.pending[slots] -= samples * np.int32(1 + left_out)
        if left_out:
            table.computed[slots] -= left_out
        durable = table.durable[slots] + counts
        table.durable[slots] = durable
        full: list[int] = (durable // block_size).tolist()
        for request, num_full in zip(requests, full, strict=True):
            if num_full <= request.named_blocks and not book.is_waited_for(request):
                continue
            self._prefixes.name_full_blocks(replica, request, num_full)
            if num_full * block_size >= replica.shared_tokens(request):
                book.release_children(request)

    def _take_prompt_logprobs(self, flight: Flight, outcome: StepOutcome, deltas: dict[Request, Delta]) -> None:
        by_handle = dict(zip(flight.handles, flight.requests, strict=True)) if outcome.prompt_logprobs else {}
        for handle, first, logprobs in outcome.prompt_logprobs:
            request = by_handle.get(handle)
            if request is None or request not in self._book.alive or first != request.prompt_logprobs_done:
                continue  # over, or delivered already by a life before a preemption
            request.prompt_logprobs_done = first + len(logprobs.counts) // 4
            deltas.setdefault(request, Delta(request)).prompt_logprobs.append((first, logprobs))

    # ---- failed ----

    def undo(self, replica: Replica, failed: Flight, error: TrivetError | None) -> None:
        """A step failed: it and those behind it, which the worker skips, have no effect. Retry with half as many tokens."""
        table = self._book.table
        self._book.totals.failed_steps += 1
        replica.resync = failed.number
        replica.token_budget = max(1, min(replica.token_budget, failed.num_tokens) // 2)
        for flight in (failed, *replica.flights):
            if flight.undone:
                continue
            flight.undone = True
            for row, request in enumerate(flight.requests):
                if not request.status.is_finished and request.worker_handle == flight.handles[row]:
                    table.computed[request.slot] -= flight.counts[row] + flight.left - 1
                    table.pending[request.slot] -= flight.samples[row] * flight.left
        for request in failed.requests:
            request.failures += 1
            if request.failures >= MOST_FAILURES and (len(failed.requests) == 1 or request.failures >= 4 * MOST_FAILURES):
                self._book.fail(request, error or TrivetError(ErrorKind.INTERNAL, "the model's steps for this request failed"))


def _refused(outcome: StepOutcome, why: str) -> TrivetError:
    return TrivetError(ErrorKind.ABORTED, f"the answer to step {outcome.number} is refused: {why}")


def _logprob_starts(outcome: StepOutcome) -> dict[int, int]:
    """Row → index of its first token among those with logprobs."""
    starts = accumulate((outcome.token_counts[row] for row in outcome.logprob_rows), initial=0)
    return dict(zip(outcome.logprob_rows, starts, strict=False))  # the last start is the end


def _broken(flags: int) -> TrivetError:
    """Why a row has no token."""
    if flags & FLAG_NON_FINITE:
        return TrivetError(ErrorKind.NON_FINITE, "the model's logits for this request were not finite")
    if flags & FLAG_PROCESSOR_FAILED:
        return TrivetError(ErrorKind.INTERNAL, "a logits processor of the worker failed on this request; the worker's log has the details")
    return invalid("logit_bias, allowed_token_ids, bad_words and min_tokens together leave no token that could be sampled")


def _timing(request: Request) -> tuple[int, int]:
    scheduled, first = request.scheduled_at or request.arrived_at, request.first_token_at or 0.0
    return int((scheduled - request.arrived_at) * 1e6), int((first - scheduled) * 1e6)
