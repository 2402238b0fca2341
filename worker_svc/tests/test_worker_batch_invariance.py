"""What the setting for batch invariance says, refuses, and tells the scheduler; that it holds is tested with the kernels."""

import logging
import re

import pytest
from trivet_proto.errors import TrivetError
from trivet_worker.batch_invariance import holds_batch_invariance

NATIVE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_native_code_holds_it_and_says_so(tmp_path, tools, load, caplog) -> None:
    tools.write_llama(tmp_path, **NATIVE)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, block_size=16, batch_invariant="on")
    assert loaded.backend.batch_invariant
    assert loaded.card.fingerprint.batch_invariant
    assert "batch invariance holds" in caplog.text


def test_torch_does_not_hold_it_and_says_so_and_refuses_when_it_must(load, caplog) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load(attention_backend="torch")
    assert not loaded.card.fingerprint.batch_invariant
    assert "batch invariance does not hold" in caplog.text
    with pytest.raises(TrivetError, match=re.escape("attention_backend torch). Take batch_invariant auto")) as caught:
        load(attention_backend="torch", batch_invariant="on")
    assert caught.value.param == "batch_invariant"


def test_off_switches_nothing_that_costs_nothing(caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert holds_batch_invariance("off", is_native=True, reasons="")
    assert "off changes nothing" in caplog.text
