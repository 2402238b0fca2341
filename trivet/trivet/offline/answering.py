"""A batch handed to an engine's thread, and the caller's wait for what comes of it."""

import concurrent.futures
from dataclasses import replace
from numbers import Integral

from trivet_frontend.offline import Batch, RequestOutput, brief
from trivet_proto.errors import ErrorKind, invalid

from trivet.offline.engine_thread import EngineThread
from trivet.offline.progress_bar import wait_with_progress


def answer(engine: EngineThread, batch: Batch, *, concurrency: int | None, progress: bool) -> list[RequestOutput]:
    """`concurrency`: at most so many prompts are with the engine at one time; none: as many as it takes.

    What is cut short when the engine ends, or is told to, has the reason of that as its error. Raises it where nothing is left.
    """
    if concurrency is not None and (not isinstance(concurrency, Integral) or isinstance(concurrency, bool)):
        raise invalid(f"concurrency: {brief(concurrency)} is not a whole number", "concurrency")
    if concurrency is not None and concurrency < 1:
        raise invalid(f"concurrency: {concurrency} is below 1", "concurrency")
    if not batch.size:
        return []
    future = engine.submit(lambda inference: batch.run(inference, at_once=concurrency or inference.max_requests))
    try:
        outputs = wait_with_progress(future, batch) if progress else future.result()
    except concurrent.futures.CancelledError:
        raise engine.why_it_ended() from None
    except BaseException:
        future.cancel()  # Ctrl-C: what is with the engine is given up
        raise
    if not engine.is_ending:
        return outputs
    # To the frontend, which outlives no engine, it looks like a scheduler that went away.
    is_cut_short = [output.error is not None and output.error.kind is ErrorKind.UNAVAILABLE for output in outputs]
    return [replace(output, error=engine.why_it_ended()) if cut else output for output, cut in zip(outputs, is_cut_short, strict=True)]
