"""`trivet bench quality`: what is compared and how it adds up, over made-up models; what it keeps, and what it refuses."""

from pathlib import Path

import pytest
import torch
from trivet.bench.quality import compare, figures_of
from trivet.bench.quality_scorer import available, parse_setting
from trivet.bench.quality_state import Compared, load_state, save_state
from trivet_proto.errors import TrivetError


class Table:
    """Gives the same logits at every place."""

    def __init__(self, *logits: float) -> None:
        self._logits = torch.tensor(logits)

    def logits(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        return self._logits.expand(*ids.shape, -1)


def test_divergence_is_that_of_the_distributions_and_only_clear_leads_can_differ() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    exact, same, other = Table(1.0, 0.0), Table(3.0, 2.0), Table(0.0, 1.0)
    found = compare(exact, [same, other], ids)  # type: ignore[arg-type, list-item]
    shares = torch.softmax(torch.tensor([1.0, 0.0]).double(), 0)
    assert found.divergence == pytest.approx([0.0, float(8 * (shares[0] - shares[1]))], abs=1e-9)
    assert (found.differing, found.led, found.tokens) == ([0, 8], 8, 8)
    near = compare(Table(0.05, 0.0), [other], ids)  # type: ignore[arg-type, list-item]
    assert (near.differing, near.led) == ([0], 0)


def test_a_setting_holds_by_its_divergence_and_by_twice_what_bfloat16_differs() -> None:
    compared = [Compared([0.01, 0.1, 1.0, 0.1], [1, 2, 1, 3], 50, 60), Compared([0.01, 0.1, 1.0, 0.1], [1, 2, 1, 3], 50, 40)]
    rows = figures_of(["bfloat16", "good", "far", "other"], compared)
    assert [row.kl for row in rows] == pytest.approx([0.0002, 0.002, 0.02, 0.002])
    assert [row.differs for row in rows] == pytest.approx([0.02, 0.04, 0.02, 0.06])
    assert [row.holds for row in rows] == [True, True, False, False]
    assert [row.holds for row in figures_of(["float32"], compared)] == [None]


def test_a_run_goes_on_where_it_was_and_another_one_is_refused(tmp_path: Path) -> None:
    file, about = tmp_path / "state", {"settings": "bfloat16", "tokens": "1024"}
    state = load_state(file, about)
    state.windows = [[1, 2], [3, 4]]
    state.compared.append(Compared([0.5], [1], 2, 2))
    save_state(file, state)
    assert load_state(file, about) == state
    with pytest.raises(TrivetError, match="is of another measurement: its tokens is 1024, asked for is 2048; name another file"):
        load_state(file, about | {"tokens": "2048"})
    file.write_text("{}")
    with pytest.raises(TrivetError, match="is no state of `trivet bench quality`"):
        load_state(file, about)
    with pytest.raises(TrivetError, match="none/state: no file can be written there"):
        load_state(tmp_path / "none" / "state", about)


def test_settings_are_those_of_the_worker() -> None:
    setting = parse_setting("bfloat16+gguf+attention_backend=torch", "/a/model", 3)
    assert (setting.dtype, setting.quantization, setting.attention_backend) == ("bfloat16", "gguf", "torch")
    assert (setting.model, setting.threads) == ("/a/model", 3)
    assert available(["bfloat16", "float32+none_such=1"]) == ["bfloat16"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bfloat31", "--dtype: 'bfloat31' is not one of auto, float32, bfloat16"),
        ("bfloat16+q3", "--quantization: 'q3' is not one of none, "),
        ("bfloat16+none_such=1", r"--settings bfloat16\+none_such=1: none_such is no setting of the worker"),
    ],
)
def test_a_setting_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(TrivetError, match=words):
        parse_setting(text, "", None)
