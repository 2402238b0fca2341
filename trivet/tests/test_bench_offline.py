"""`trivet bench offline` and `latency` over an engine without a model: what they ask, print and write, and what they refuse."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trivet.bench import latency, offline
from trivet.bench.own_engine import Turn
from trivet.bench.report import check_outputs
from trivet.bench.told_to_end import interruptible
from trivet.commands.bench import run
from trivet.offline.engine import StepTimes
from trivet.offline.engine_thread import EngineThread
from trivet_frontend.config import FrontendSettings
from trivet_proto.errors import TrivetError
from trivet_proto.v1 import worker_pb2


@pytest.fixture
def given_flags(played: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine under measurement is started with; another one is."""
    given: list[str] = []

    @contextlib.contextmanager
    def own_engine(flags: Sequence[str]) -> Iterator[EngineThread]:
        given.extend(flags)
        engine = EngineThread(played.open, lambda address: FrontendSettings(scheduler=(address,)))
        engine.start()
        yield engine
        engine.stop()

    monkeypatch.setattr(offline, "own_engine", own_engine)
    monkeypatch.setattr(latency, "own_engine", own_engine)
    return given


def test_offline_measures_the_workloads_and_what_the_suite_keeps_of_them(
    given_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, written = tmp_path / "suite.json", tmp_path / "offline.json"
    figures = {"output_tokens_per_s": 10.0, "total_tokens_per_s": 20.0}
    suite.write_text(json.dumps({"medians": [{"workload": "W1", "server": "suite", "figures": figures}]}))
    words = ["--workload", "W1,W3", "--runs", "2", "--seed", "s", "--against", str(suite), "--json", str(written)]
    assert run(["offline", *words, "--", "--dtype", "float32"]) == 0
    assert given_flags == ["--dtype", "float32"]
    content = json.loads(written.read_text())
    assert [each["workload"] for each in content["runs"]] == ["W1", "W1", "W3", "W3"]
    assert [each["output_tokens"] for each in content["runs"]] == [4 * 128, 4 * 128, 32 * 32, 32 * 32]
    middle = content["medians"][0]
    assert content["ratios"] == [
        {
            "workload": "W1",
            "server": "suite",
            "output_tokens_per_s": 10.0 / middle["output_tokens_per_s"],
            "total_tokens_per_s": 20.0 / middle["total_tokens_per_s"],
        }
    ]
    printed = capsys.readouterr().out
    assert "suite ÷ in process" in printed
    assert f"{middle['output_tokens_per_s']:.1f}" in printed


def test_latency_repeats_one_batch(given_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "latency.json"
    words = ["--batch-size", "3", "--input-tokens", "5", "--output-tokens", "4", "--repeat", "5", "--warm-up", "1", "--json"]
    assert run(["latency", *words, str(written), "--", "/a/model"]) == 0
    assert given_flags == ["/a/model"]
    content = json.loads(written.read_text())
    assert len(content["seconds"]) == 5
    batch, token = content["milliseconds"]["batch"], content["milliseconds"]["token"]
    assert batch["least"] == pytest.approx(1e3 * min(content["seconds"]))
    assert batch["least"] <= batch["p50"] <= batch["p90"] <= batch["p99"]
    assert token["p50"] == pytest.approx(batch["p50"] / 4)
    assert "3 × 5 in, 4 out, 5 times" in capsys.readouterr().out


def test_a_file_that_cannot_take_the_figures_is_named(given_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["latency", "--input-tokens", "5", "--output-tokens", "2", "--repeat", "1", "--warm-up", "0", "--json"]
    with pytest.raises(TrivetError, match="--json /dev/full cannot be written"):
        run([*words, "/dev/full"])
    assert "1 × 5 in, 2 out" in capsys.readouterr().out
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("as it was")
    check_outputs(new, None)
    check_outputs(old, None)
    assert not new.exists()
    assert old.read_text() == "as it was"


def test_an_interrupt_does_not_wait_for_native_work() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    held, before = threading.Event(), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            interruptible(held.wait)
    finally:
        held.set()
        signal.signal(signal.SIGALRM, before)
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_the_parts_of_a_step_add_up_to_its_time_and_are_told_by_an_engine_that_knows_them() -> None:
    before = StepTimes()
    before.take(a_result(100_000, 1000, 2000, 3000))
    now = replace(before)
    for _ in range(4):
        now.take(a_result(1000, 500, 8000, 500))
    now.take(worker_pb2.StepResult())  # news of finished requests: nothing was computed
    turn = Turn(0.1, 0.1, 0.1, prompt_tokens=1, cached_tokens=0, output_tokens=4, step_times=now.since(before))
    parts = latency.parts_of_a_step([turn, turn])
    assert parts == pytest.approx({"link": 1.0, "input": 0.5, "forward": 8.0, "sample": 0.5, "else": 15.0})
    assert latency.parts_of_a_step([turn, replace(turn, step_times=None)]) == {}


def a_result(link_us: int, input_us: int, forward_us: int, sample_us: int) -> worker_pb2.StepResult:
    total_us = input_us + forward_us + sample_us
    timing = worker_pb2.StepTiming(link_us=link_us, input_us=input_us, forward_us=forward_us, sample_us=sample_us, total_us=total_us)
    return worker_pb2.StepResult(timing=timing)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["offline", "--runs", "0"], "--runs 0: more than 0 is wanted"),
        (["offline", "--workload", "W9"], "--workload W9 is not known"),
        (["offline", "--against", "/no/such.json"], "--against /no/such.json: the JSON of a `trivet bench serve` is wanted"),
        (["latency", "--repeat", "0"], "--repeat 0: at least 1 is wanted"),
        (["latency", "--json", "/proc/x.json"], "--json /proc/x.json: no file can be written there"),
        (["latency", "--json", "/no/such/folder/x"], "--json /no/such/folder/x: no file can be written there"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(given_flags: list[str], words: list[str], refusal: str) -> None:
    with pytest.raises(TrivetError, match=refusal):
        run(words)
    assert given_flags == []
