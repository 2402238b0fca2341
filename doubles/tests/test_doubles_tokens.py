"""The token law: the same by slots as by ids, another for everything that it depends on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trivet_doubles.model import DoubleModel, load_double_model
from trivet_doubles.tokens import TokenLaw, expected_output, hash_of, next_tokens, slot_hashes, slot_values
from trivet_doubles.vocabulary import word_ids
from trivet_proto.errors import TrivetError

CHOICES = np.arange(1000, dtype=np.int32)

ids_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
seeds = st.integers(0, 2**64 - 1)


@given(ids_lists, seeds, st.integers(0, 40))
@settings(max_examples=50)
def test_slots_in_any_two_pieces_give_the_token_that_the_ids_give(ids: list[int], seed: int, cut: int) -> None:
    whole = np.array(ids, dtype=np.int32)
    cut = min(cut, len(ids))
    first = slot_values(whole[:cut])
    second = slot_values(whole[cut:], cut, int(first[-1])) if cut else slot_values(whole)
    last = np.concatenate([first, second])[-1:]
    token = next_tokens(last, np.array([seed], dtype=np.uint64), np.array([len(ids)]), CHOICES)
    assert token.tolist() == expected_output(ids, seed, 1, CHOICES)


@given(ids_lists, seeds)
@settings(max_examples=30)
def test_an_output_goes_on_where_it_was_cut(ids: list[int], seed: int) -> None:
    whole = expected_output(ids, seed, 12, CHOICES)
    assert expected_output(ids + whole[:5], seed, 7, CHOICES) == whole[5:]


def test_prompt_order_seed_and_position_each_change_the_output() -> None:
    outputs = [
        expected_output(ids, seed, 8, CHOICES) for ids, seed in [([1, 2, 3], 0), ([2, 1, 3], 0), ([1, 2, 3], 1), ([3], 0), ([3, 3], 0)]
    ]
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_the_hash_of_one_is_the_hash_of_many() -> None:
    ids, positions = np.array([0, 5, 2**31 - 1], dtype=np.int32), np.array([0, 7, 100_000])
    assert slot_hashes(ids, positions).tolist() == [hash_of(int(token), int(at)) for token, at in zip(ids, positions, strict=True)]


@pytest.mark.parametrize("is_synthetic", [True, False])
def test_an_output_reads_as_words_and_has_no_end(is_synthetic: bool) -> None:
    model = load_double_model("", is_synthetic=is_synthetic)
    tokenizer = Tokenizer.from_str(model.bundle.files["tokenizer.json"].decode())
    output = expected_output([1, 2, 3], 7, 200, model.law().choices)
    words = tokenizer.decode(output).split(" ")
    assert words[0] == ""
    assert len(words) == 201
    assert all(word.isalpha() and word.islower() for word in words[1:])
    assert len(set(words)) > 50


def test_the_synthetic_tokenizer_takes_any_text(model: DoubleModel) -> None:
    tokenizer = Tokenizer.from_str(model.bundle.files["tokenizer.json"].decode())
    text = "Grüße, 世界! \n\t<|start|>user"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_an_end_token_comes_as_often_as_asked(model: DoubleModel) -> None:
    (end,) = model.end_ids
    output = expected_output([1], 0, 3000, model.law(end_every=10).choices)
    assert 200 < output.count(end) < 400
    assert end not in expected_output([1], 0, 3000, model.law().choices)


def test_a_vocabulary_without_words_is_used_as_it_is() -> None:
    tokenizer = b'{"added_tokens": [{"id": 0}], "model": {"vocab": [["<s>", 0], ["x", -1.5], ["y", -2]]}}'
    assert word_ids(tokenizer).tolist() == [1, 2]


def test_a_model_and_synthetic_together_are_refused() -> None:
    with pytest.raises(TrivetError, match="is named too; give one of the two"):
        load_double_model("here.gguf", is_synthetic=True)


def test_a_stream_has_no_end() -> None:
    stream = TokenLaw(CHOICES).stream([], 0)
    assert len([next(stream) for _ in range(500)]) == 500
