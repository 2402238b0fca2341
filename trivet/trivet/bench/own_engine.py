"""The engine of one process under measurement: started from the flags of `trivet serve`, asked with the prompts of a workload."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trivet_frontend.offline import Batch, Prompt, SamplingParams
from trivet_proto.errors import TrivetError

from trivet.bench.load.prompts import BodyOptions, Endpoint, PromptForm, make_bodies
from trivet.bench.load.workloads import Workload
from trivet.launch.settings import load_serve_settings
from trivet.offline.choosing import this_process
from trivet.offline.engine import StepTimes
from trivet.offline.engine_thread import EngineThread

OPTIONS = BodyOptions(PromptForm.WORDS, range(0), Endpoint.COMPLETIONS, ignore_eos=True, extra={})


@dataclass(frozen=True, slots=True)
class Turn:
    """One workload, once. CPU seconds are those of the whole process, and of all in it that is not computing. `step_times` is None where
    the engine tells none."""

    seconds: float
    cpu_seconds: float
    loop_cpu_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    step_times: StepTimes | None


@contextmanager
def own_engine(flags: Sequence[str]) -> Iterator[EngineThread]:
    """Ready inside the block. Raises `TrivetError` for flags that are not right."""
    environ = dict(os.environ)
    engine = this_process(load_serve_settings(["--log-level=warning", *flags], environ, prog="trivet bench"), environ)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def take_turn(engine: EngineThread, workload: Workload, seed: str) -> Turn:
    """The prompts of `trivet bench serve` with the same seed. Raises `TrivetError` where one is not answered."""
    bodies = [json.loads(body) for body in make_bodies(workload, seed, OPTIONS, None)]
    prompts: list[Prompt] = [body["prompt"] for body in bodies]
    batch = Batch(prompts, [SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies])
    before = None if engine.step_times is None else replace(engine.step_times)
    cpu, loop_cpu, started = time.process_time(), _loop_cpu_seconds(), time.perf_counter()
    outputs = engine.submit(lambda inference: batch.run(inference, at_once=workload.concurrency)).result()
    seconds = time.perf_counter() - started
    cpu, loop_cpu = time.process_time() - cpu, _loop_cpu_seconds() - loop_cpu
    step_times = None if engine.step_times is None or before is None else engine.step_times.since(before)
    for output in outputs:
        if output.error is not None:
            raise TrivetError(output.error.kind, f"{workload.name}: {output.error.message}")
    return Turn(
        seconds=seconds,
        cpu_seconds=cpu,
        loop_cpu_seconds=loop_cpu,
        prompt_tokens=batch.prompt_tokens,
        cached_tokens=sum(output.cached_tokens for output in outputs),
        output_tokens=batch.output_tokens,
        step_times=step_times,
    )


def _loop_cpu_seconds() -> float:
    """Of the thread with the frontend, the scheduler and the worker's link."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == EngineThread.NAME]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)
