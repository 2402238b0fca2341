"""What a folder's config.json says wrong is refused in one line: the file, the key, the value, and what was expected."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from trivet_checkpoint import Checkpoint, check_sizes, open_checkpoint, resolve_model
from trivet_proto.errors import ErrorKind, TrivetError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
SERVED = ("LlamaForCausalLM",)
COUNTS = (
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
NUMBERS = ("rms_norm_eps", "rope_theta", "attn_logit_softcapping")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
NEEDED = ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def opened(folder: Path, config: dict[str, object]) -> Checkpoint:
    """A checkpoint of that description, checked as for a worker."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "</s>": 1}}, "added_tokens": []}))
    save_file({"one": np.ones((2, 3), dtype=np.float32)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder, served=SERVED)
    check_sizes(checkpoint)
    return checkpoint


def refusal(folder: Path, **changes: object) -> str:
    with pytest.raises(TrivetError) as caught:
        opened(folder, CONFIG | changes)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert caught.value.message.startswith(f"{folder / 'config.json'}: ")
    assert len(caught.value.message.removeprefix(str(folder))) < 200
    return caught.value.message


@pytest.mark.parametrize("value", ["64", -1, 0, 1.5, 64.0, True, [64], {}, 2**31, 10**30])
@pytest.mark.parametrize("key", COUNTS)
def test_what_must_be_a_positive_whole_number_is_nothing_else(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(tmp_path, **{key: value})
    assert f"{key} is {value!r}, expected one positive whole number" in message or f"{key} is {float(value)!r}," in message  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1e-5", -1.0, 0, False, [1.0], {}, 1e39])
@pytest.mark.parametrize("key", NUMBERS)
def test_what_must_be_a_positive_number_is_nothing_else(tmp_path: Path, key: str, value: object) -> None:
    assert f"{key} is {value!r}, expected a positive number" in refusal(tmp_path, **{key: value})


@pytest.mark.parametrize("value", ["yes", 1, 0, [], {}])
@pytest.mark.parametrize("key", FLAGS)
def test_what_must_be_true_or_false_is_nothing_else(tmp_path: Path, key: str, value: object) -> None:
    assert f"{key} is {value!r}, expected true or false" in refusal(tmp_path, **{key: value})


@pytest.mark.parametrize("value", [5, ["silu"], False])
def test_an_activation_is_a_text(tmp_path: Path, value: object) -> None:
    assert f"hidden_act is {value!r}, expected a text" in refusal(tmp_path, hidden_act=value)


@pytest.mark.parametrize("key", [*NEEDED, "rms_norm_eps"])
@pytest.mark.parametrize("null", [False, True])
def test_an_entry_that_is_needed_and_absent_or_null_is_named(tmp_path: Path, key: str, null: bool) -> None:
    config = {name: value for name, value in CONFIG.items() if name != key} | ({key: None} if null else {})
    with pytest.raises(TrivetError, match=rf"config\.json: {key} is missing"):
        opened(tmp_path, config)


def test_optional_entries_that_are_null_count_as_absent(tmp_path: Path) -> None:
    optional = ("num_key_value_heads", "head_dim", "sliding_window", *NUMBERS[1:], *FLAGS, "hidden_act", "rope_scaling", "eos_token_id")
    config = opened(tmp_path, CONFIG | dict.fromkeys(optional)).config
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] is None
    assert not {"head_dim", "rope_theta", "hidden_act", "eos_token_id"} & config.keys()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["x", "", 0, 5, [], [1], False])
def test_rotary_parameters_are_an_object(tmp_path: Path, key: str, value: object) -> None:
    assert f"{key} is {value!r}, expected an object" in refusal(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": 5}, "rope_scaling.rope_type is 5, expected a text"),
        ({"type": ["linear"], "factor": 2.0}, "rope_scaling.type is ['linear'], expected a text"),
        ({"rope_theta": "1e4"}, "rope_scaling.rope_theta is '1e4', expected a positive number"),
        ({"type": "linear"}, "rope_scaling.factor is missing"),
        ({"type": "linear", "factor": 0}, "rope_scaling.factor is 0, expected a positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        (LLAMA3 | {"high_freq_factor": "4"}, "rope_scaling.high_freq_factor is '4', expected a positive number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "rope_scaling.high_freq_factor is 1.0, expected more than low_freq_factor, which is 1.0"),
    ],
)
def test_a_rotary_scaling_says_what_its_kind_needs(tmp_path: Path, rope: dict[str, object], why: str) -> None:
    assert why in refusal(tmp_path, rope_scaling=rope)


@pytest.mark.parametrize("value", ["2", -1, 1.0, True, [1, "2"], [[1]], {}, 2**31])
def test_the_ends_are_ids_of_tokens_in_both_files(tmp_path: Path, value: object) -> None:
    assert f"eos_token_id is {value!r}, expected the id of a token" in refusal(tmp_path, eos_token_id=value)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TrivetError, match=r"generation_config\.json: eos_token_id is "):
        opened(tmp_path, CONFIG)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_the_token_at_which_texts_begin_or_end_is_one_of_the_vocabulary(tmp_path: Path, name: str) -> None:
    key, why = f"{name}_token_id", f"{name}_token_id is 4, expected less than vocab_size, which is 4"
    assert why in refusal(tmp_path, **{key: 4})
    (tmp_path / "generation_config.json").write_text(json.dumps({key: 4}))
    with pytest.raises(TrivetError, match=rf"generation_config\.json: {why}"):
        opened(tmp_path, CONFIG | {key: 3})


@pytest.mark.parametrize("value", ["hot", True, [1.0], {}])
@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"])
def test_a_sampling_default_is_a_number_or_null(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(TrivetError) as caught:
        opened(tmp_path, CONFIG)
    assert caught.value.message == f"{tmp_path / 'generation_config.json'}: {key} is {value!r}, expected a number"
    (tmp_path / "generation_config.json").write_text(json.dumps({key: None}))
    assert opened(tmp_path, CONFIG).generation_config == {key: None}


@pytest.mark.parametrize("name", ["bos", "pad", "unk"])
def test_another_special_token_is_an_id_and_one_below_zero_is_none(tmp_path: Path, name: str) -> None:
    assert f"{name}_token_id is '1', expected the id of a token" in refusal(tmp_path, **{f"{name}_token_id": "1"})
    special = opened(tmp_path, CONFIG | {f"{name}_token_id": -1}).special_tokens
    assert getattr(special, f"{name}_id") is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of num_key_value_heads, which is 2"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"head_dim": None, "num_attention_heads": 64}, "hidden_size is 32, expected a multiple of 2 · num_attention_heads = 128"),
    ],
)
def test_heads_that_do_not_fit_together_are_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    assert why in refusal(tmp_path, **changes)


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    assert "…, expected" in refusal(tmp_path, hidden_size=[1] * 1000)


@pytest.mark.parametrize("architectures", [["CLIPModel"], "CLIPModel", [["CLIPModel"]], 5, [], None])
def test_an_architecture_that_is_not_served_is_refused_before_all_else(tmp_path: Path, architectures: object) -> None:
    with pytest.raises(TrivetError, match=r"config\.json: the architecture .* is not served; served are LlamaForCausalLM") as caught:
        opened(tmp_path, {"architectures": architectures, "rope_scaling": "x"})
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION


def test_what_is_neither_file_nor_folder_is_not_called_one() -> None:
    with pytest.raises(TrivetError, match=r"/dev/null is neither a file nor a folder"):
        resolve_model("/dev/null")
