"""A step leaves: the counters move as if it were done, and what it does is written down.

Step k + 1 leaves while step k is in flight: a sampled token whose id is not known yet counts as *pending*. A step of several iterations
counts as if all of them ran; what is left out in the end is taken back with the answer that says so, and by the worker at once.
"""

import numpy as np

from trivet_scheduler.core.book import RequestBook
from trivet_scheduler.core.growth import KnownRows
from trivet_scheduler.plan import Flight, NewWork, StepPlan
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request


def depart(book: RequestBook, replica: Replica, known: KnownRows, new: list[tuple[Request, int]], iterations: int = 1) -> StepPlan:
    """The plan of a step with these rows, new ones first; the replica has one flight more. Several `iterations`: of decodes alone."""
    table, now = book.table, book.clock.monotonic()
    requests = [request for request, _ in new] + known.requests
    counts = np.concatenate([np.array([count for _, count in new], dtype=np.int32), known.counts])
    slots = np.fromiter((request.slot for request in requests), dtype=np.int64, count=len(requests))
    computed = table.computed[slots]
    after = computed + counts
    samples = (after == table.tokens[slots] + table.pending[slots]) & (table.limit[slots] > table.prompt[slots])
    number = replica.next_step()
    work = [
        NewWork(request, request.worker_handle, request.all_ids(), np.array(request.block_table, dtype=np.int32), int(done), count)
        for (request, count), done in zip(new, computed, strict=False)
    ]
    table.computed[slots] = after + (iterations - 1)
    table.pending[slots] += samples * np.int32(iterations)
    for request in requests:
        request.steps_in_flight += 1
        request.last_step = number
        if request.scheduled_at is None:
            request.scheduled_at = now
    handles = [request.worker_handle for request in requests]
    num_tokens = int(counts.sum())
    forecast_s = replica.forecast.seconds(num_tokens)
    replica.flights.append(Flight(number, requests, handles, slots, counts, samples, now, num_tokens, forecast_s, iterations=iterations))
    finished, replica.finished_handles = replica.finished_handles, []
    zero, replica.blocks_to_zero = replica.blocks_to_zero, []
    resync, replica.resync = replica.resync, None
    book.totals.steps += 1
    return StepPlan(
        number=number,
        new=work,
        known_handles=np.array(handles[len(new) :], dtype=np.int32),
        known_scheduled=known.counts,
        known_computed=computed[len(new) :],
        new_blocks=np.array([block for blocks in known.new_blocks for block in blocks], dtype=np.int32),
        new_block_counts=np.array([len(blocks) for blocks in known.new_blocks], dtype=np.int32),
        finished_handles=finished,
        blocks_to_zero=zero,
        resync=resync,
        num_tokens=num_tokens,
        forecast_s=forecast_s,
        run_ahead=iterations,
    )
