"""The thread of an engine: started, told to end, and what callers see of an engine that dies, over a scheduler without a model."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from trivet.offline.answering import answer as answered
from trivet.offline.engine import RunningEngine
from trivet.offline.engine_thread import EngineThread
from trivet_frontend.config import FrontendSettings
from trivet_frontend.offline import Batch, RequestOutput, SamplingParams
from trivet_proto.errors import ErrorKind, TrivetError


@pytest.fixture
def thread(played: Any) -> Iterator[EngineThread]:
    started = EngineThread(played.open, lambda address: FrontendSettings(scheduler=(address,)))
    started.start()
    yield started
    started.stop()
    assert played.gone.is_set()
    assert "trivet-engine" not in {each.name for each in threading.enumerate()}


def answer(thread: EngineThread, count: int) -> list[RequestOutput]:
    batch = Batch([[5, 6], [7]], [SamplingParams(max_tokens=count, ignore_eos=True)] * 2)
    return thread.submit(lambda inference: batch.run(inference, at_once=2)).result(30)


def test_work_is_done_until_the_thread_is_stopped(thread: EngineThread) -> None:
    assert [len(output.outputs[0].token_ids) for output in answer(thread, 3)] == [3, 3]
    thread.stop()
    thread.stop()
    with pytest.raises(TrivetError, match="this LLM has been closed"):
        answer(thread, 3)


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_what_runs_when_the_engine_ends_says_why(played: Any, thread: EngineThread, is_told: bool, progress: bool) -> None:
    batch = Batch([[5, 6], [7]], SamplingParams(max_tokens=7000, ignore_eos=True))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answered, thread, batch, concurrency=None, progress=progress)
        deadline = time.monotonic() + 30
        while not batch.output_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if is_told:
            thread.stop()
        else:
            played.die(TrivetError(ErrorKind.UNAVAILABLE, "worker-0 died once too often"))
        try:
            errors = [output.error for output in waiting.result(30)]
        except TrivetError as error:
            errors = [error]
    reason = "this LLM has been closed" if is_told else "worker-0 died once too often"
    assert {str(error) for error in errors} == {reason}


@pytest.mark.parametrize(
    ("concurrency", "words"), [("2", "'2' is not a w"), (1.5, "1.5 is not a w"), (True, "True is not a w"), (0, "0 is b")]
)
def test_a_concurrency_that_is_no_number_of_prompts_is_refused(thread: EngineThread, concurrency: Any, words: str) -> None:
    with pytest.raises(TrivetError, match=f"^concurrency: {words}"):
        answered(thread, Batch("One"), concurrency=concurrency, progress=False)


def test_what_runs_when_the_engine_dies_ends_and_later_calls_say_of_what_it_died(played: Any, thread: EngineThread) -> None:
    batch = Batch([[5, 6], [7]], [SamplingParams(max_tokens=100, ignore_eos=True)] * 2)
    running = thread.submit(lambda inference: batch.run(inference, at_once=2))
    played.die(TrivetError(ErrorKind.UNAVAILABLE, "worker-0 died once too often"))
    assert played.gone.wait(30)
    with contextlib.suppress(concurrent.futures.CancelledError, TrivetError):
        assert all(output.error is not None for output in running.result(30))
    thread.stop()
    with pytest.raises(TrivetError, match="worker-0 died once too often"):
        answer(thread, 3)


def test_an_engine_that_breaks_is_logged_and_told(played: Any, thread: EngineThread, caplog: pytest.LogCaptureFixture) -> None:
    played.die(RuntimeError("a fault of ours"))
    assert played.gone.wait(30)
    thread.stop()
    with pytest.raises(TrivetError, match="a fault of ours") as told:
        answer(thread, 3)
    assert told.value.kind is ErrorKind.INTERNAL
    assert "a fault of ours" in caplog.text


def test_an_engine_that_cannot_start_leaves_nothing() -> None:
    @contextlib.asynccontextmanager
    async def refuse() -> AsyncIterator[RunningEngine]:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, "no such model")
        yield

    before = threading.active_count()
    with pytest.raises(TrivetError, match="no such model"):
        EngineThread(refuse, lambda address: FrontendSettings(scheduler=(address,))).start()
    assert threading.active_count() == before


def test_an_engine_that_dies_while_starting_ends_the_start(played: Any) -> None:
    @contextlib.asynccontextmanager
    async def dying() -> AsyncIterator[RunningEngine]:
        async with played.open() as engine:
            played.die(TrivetError(ErrorKind.UNAVAILABLE, "it is gone already"))
            yield RunningEngine("unix:/nobody/is/there.sock", engine.dial, engine.life)

    with pytest.raises(TrivetError, match="it is gone already"):
        EngineThread(dying, lambda address: FrontendSettings(scheduler=(address,))).start()
    assert played.gone.is_set()
