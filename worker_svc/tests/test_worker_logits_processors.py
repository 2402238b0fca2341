"""Custom logits processors in a worker: the example of the docs, what they are told, where they run, and what their failures end."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_f32, pack_i32, unpack_i32, unpack_u8
from trivet_proto.v1 import worker_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "logits-processors.md").read_text()
EXAMPLE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]


class Recorder:
    """Takes whom it is told to, forces token 7, and writes down what it is told."""

    is_argmax_invariant = False
    forced = 7

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.told: list[object] = []

    def takes(self, request) -> bool:
        if request.arguments.get("refuse"):
            raise ValueError("not this one")
        return bool(request.arguments.get("force"))

    def update(self, change) -> None:
        self.told.append(([slot for slot, _ in change.added], list(change.removed)))

    def apply(self, logits, rows) -> None:
        assert logits.shape == (len(rows), self.vocab_size)
        for row in rows:
            self.told.append((row.slot, row.prompt.tolist(), row.output.tolist()))
        logits[:, self.forced] += 1000


class Flat(Recorder):
    """After the temperature: whatever had a chance has the same."""

    is_argmax_invariant = True

    def apply(self, logits, rows) -> None:
        self.told.append(logits.max(dim=1).values.tolist())
        logits.masked_fill_(logits < 0, float("-inf"))


class Failing(Recorder):
    def apply(self, logits, rows) -> None:
        raise RuntimeError("by design")


class Lacking:
    def __init__(self, vocab_size: int) -> None:
        pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("users_processors")
    for each in (Recorder, Flat, Failing, Lacking):
        setattr(made, each.__name__, each)
    exec(EXAMPLE, made.__dict__)
    monkeypatch.setitem(sys.modules, "users_processors", made)
    return made


@pytest.fixture
def worker(module, load, tools):
    def make(*names: str):
        driver = tools.StepDriver(load(logits_processors=tuple(f"users_processors:{name}" for name in names)))
        return driver, driver.runner._batch._processors._processors

    return make


def test_the_example_of_the_page_repeats_no_pair(worker) -> None:
    driver, _ = worker("NoRepeatedNgram")
    bias = {"logit_bias_ids": pack_i32([3, 4]), "logit_bias_values": pack_f32([90.0, 90.0]), "temperature": 0.0}
    freely = driver.run(driver.request([5, 6], **bias), 12)
    held = driver.run(driver.request([5, 6], extra=b'{"no_repeat_ngram": 2}', **bias), 12)
    pairs = list(pairwise(held))
    assert len(set(pairs)) == len(pairs)
    assert len(set(pairwise(freely))) < 11


def test_a_processor_is_handed_only_rows_that_it_took_and_is_told_who_comes_and_goes(worker) -> None:
    driver, (recorder,) = worker("Recorder")
    force = b'{"force": true}'
    first, second = driver.request([5, 6], extra=force, temperature=0.0), driver.request([8], temperature=0.0)
    tokens = unpack_i32(driver.step([first, second]).token_ids).tolist()
    assert tokens[0] == 7 != tokens[1]
    driver.step(known=[(first.handle, 2, 1), (second.handle, 1, 1)])
    third = driver.request([9], extra=force, temperature=0.0)
    driver.step([third], finished=[first.handle])
    assert recorder.told == [([0], []), (0, [5, 6], []), (0, [5, 6], [7]), ([0], [0]), (0, [9], [])]


def test_one_that_cannot_change_the_argmax_runs_after_the_temperature(worker) -> None:
    driver, (flat,) = worker("Flat")
    alone = driver.run(driver.request([5, 6], temperature=0.0), 4)
    assert driver.run(driver.request([5, 6], temperature=0.5, extra=b'{"force": 1}'), 4) == alone
    assert flat.told[1] == [0.0]


@pytest.mark.parametrize("broken", [{"name": "Failing", "extra": b'{"force": 1}'}, {"name": "Recorder", "extra": b'{"refuse": 1}'},
                                    {"name": "Recorder", "extra": b"[]"}, {"name": "Recorder", "extra": b"{"}])  # fmt: skip
def test_a_failure_ends_the_requests_it_is_about_and_nobody_else(worker, broken) -> None:
    driver, _ = worker(broken["name"])
    hit, other = driver.request([5, 6], extra=broken["extra"], temperature=0.0), driver.request([8], temperature=0.0)
    result = driver.step([hit, other])
    assert unpack_u8(result.flags).tolist() == [worker_pb2.ROW_FLAG_PROCESSOR_FAILED, 0]
    assert unpack_i32(result.token_counts).tolist() == [0, 1]
    driver.step(known=[(other.handle, 1, 1)], finished=[hit.handle])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:Thing", "nowhere:Thing could not be made: ModuleNotFoundError"),
        ("users_processors", "is no name of a class"),
        ("users_processors:Missing", "could not be made: AttributeError"),
        ("users_processors:Lacking", "has no is_argmax_invariant, takes, update, apply"),
    ],
)
def test_one_that_cannot_be_had_stops_the_start_by_name(module, load, name, words) -> None:
    with pytest.raises(TrivetError, match=re.escape(words)) as caught:
        load(logits_processors=(name,))
    assert caught.value.param == "logits_processors"
