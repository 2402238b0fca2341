"""A model whose config.json cannot be meant is refused in one line before any memory is taken, whatever stands in it."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_worker import loading
from trivet_worker.config import WorkerSettings
from trivet_worker.loading import prepare_model
from trivet_worker.models.llama_tensors import needed_tensors, weight_values
from trivet_worker.models.registry import ARCHITECTURES

FORMS = [{"block_size": 16, "model_form": "native"}, {"block_size": 16, "attention_backend": "torch"}]
KEYS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "sliding_window", "rms_norm_eps", "rope_theta", "attn_logit_softcapping", "hidden_act"),
    *(
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "rope_scaling",
        "rope_parameters",
        "eos_token_id",
        "bos_token_id",
        "architectures",
    ),
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 200) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), SCALARS)


@pytest.fixture
def changed(tools, tmp_path):
    """Writes a folder of a small model whose config.json has other entries."""
    folder = tmp_path / "model"
    tools.write_llama(folder, hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    written = json.loads((folder / "config.json").read_text())

    def change(**entries: object) -> Path:
        (folder / "config.json").write_text(json.dumps(written | entries))
        return folder

    return change


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a model is a failure."""

    def build(*_: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr(loading, "build_model", build)


@pytest.mark.parametrize("form", FORMS, ids=["native", "torch"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_tensors_that_a_config_calls_for_are_those_that_its_model_has_places_for(tools, tmp_path, load, form, bias, tied) -> None:
    biases = {"attention_bias": bias, "mlp_bias": bias}
    tools.write_llama(tmp_path, hidden_size=96, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=tied, **biases)
    config = json.loads((tmp_path / "config.json").read_text())
    places = {place.name: tuple(place.target.shape) for place in load(tmp_path, **form).runner._model.placements()}
    needed = {tensor.name: tensor.shape for tensor in needed_tensors(config)}
    assert needed == places
    sizes = [shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in needed.values()]
    assert weight_values(config) == sum(sizes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 1_000_000_000}, r"model\.layers\.2\.input_layernorm\.weight is missing \(num_hidden_layers is 1000000000\)"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight is missing \(num_hidden_layers is 3\)"),
        ({"vocab_size": 2_000_000_000}, r"embed_tokens\.weight has the shape \[96, 96\], the model needs \[2000000000, 96\]"),
        ({"intermediate_size": 2_000_000_000}, r"gate_proj\.weight has the shape \[64, 96\], the model needs \[2000000000, 96\]"),
        ({"head_dim": 2_000_000_000}, r"q_proj\.weight has the shape \[96, 96\], the model needs \[6000000000, 96\]"),
        (
            {"max_position_embeddings": 2_000_000_000},
            r"the rotary angles of 2000000000 positions take 256000000000 bytes, this machine has",
        ),
    ],
)
@pytest.mark.usefixtures("unbuilt")
def test_sizes_that_are_not_the_files_are_refused_before_anything_is_built(changed, load, monkeypatch, changes, why) -> None:
    monkeypatch.setattr(loading, "memory_total", lambda: 1 << 37)
    with pytest.raises(TrivetError, match=why) as error:
        load(changed(**changes))
    assert error.value.kind is ErrorKind.FAILED_PRECONDITION


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 1_000_000_000}, {"vocab_size": 2_000_000_000}, {"intermediate_size": 2_000_000_000}]
)
@pytest.mark.usefixtures("unbuilt")
def test_dummy_weights_that_the_machine_cannot_hold_are_refused_before_anything_is_built(
    changed, load, monkeypatch, changes, quantization
) -> None:
    monkeypatch.setattr(loading, "memory_total", lambda: 1 << 37)
    with pytest.raises(TrivetError, match=r"config\.json: its weights take \d+ bytes at least, this machine has 137438953472") as error:
        load(changed(**changes), load_format="dummy", quantization=quantization)
    assert error.value.kind is ErrorKind.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"num_kv_blocks": 4_000_000},
            r"num_kv_blocks: 4000000 is a KV cache of \d+ bytes, the model takes \d+ beside it, this machine has",
        ),
        ({"num_kv_blocks": None, "kv_cache_memory": 1 << 40}, r"kv_cache_memory: 1099511627776 is a KV cache of 1099511627776 bytes"),
    ],
    ids=["blocks", "bytes"],
)
def test_a_cache_that_the_machine_cannot_hold_is_refused_before_weights_are_read(llama_folder, load, monkeypatch, asked, why) -> None:
    monkeypatch.setattr(loading, "memory_total", lambda: 1 << 30)
    monkeypatch.setattr(loading.loader, "load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(TrivetError, match=f"{why}.*lower it, or leave it out") as error:
        load(**asked)
    assert error.value.kind is ErrorKind.FAILED_PRECONDITION


def test_a_cache_for_which_there_is_no_room_now_is_warned_of(load, monkeypatch, caplog) -> None:
    monkeypatch.setattr(loading, "memory_available", lambda: 1 << 20)
    assert load(num_kv_blocks=None, kv_cache_memory=1 << 21).kv_bytes == 1 << 21
    assert "kv_cache_memory: 2097152 is a KV cache of 2097152 bytes, 1048576 are free now" in caplog.text


def test_a_machine_has_more_memory_than_is_free_of_it() -> None:
    assert 0 < loading.memory_available() <= loading.memory_total()


@pytest.mark.usefixtures("unbuilt")
def test_a_model_of_another_kind_is_refused_for_its_architecture_and_not_for_an_entry_that_it_lacks(changed, load) -> None:
    folder = changed(architectures=["CLIPModel"])
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrivetError, match=rf"json: the architecture CLIPModel is not served; served are {', '.join(ARCHITECTURES)}"):
        load(folder)


def test_a_rotary_scaling_that_is_not_known_is_refused_by_either_form_before_weights(changed, load, monkeypatch) -> None:
    monkeypatch.setattr(loading.loader, "load_weights", lambda *_: pytest.fail("weights are read"))
    for form in FORMS:
        with pytest.raises(TrivetError, match=r"config\.json: rope_scaling of type yarn is not known; known are default, linear, llama3"):
            load(changed(rope_parameters={"rope_type": "yarn", "factor": 2.0}), **form)


@pytest.mark.usefixtures("unbuilt")
def test_an_activation_that_is_not_served_is_refused_with_the_file(changed, load) -> None:
    with pytest.raises(TrivetError, match=r"config\.json: hidden_act relu is not served for Llama models; served are silu, gelu"):
        load(changed(hidden_act="relu"))


@given(entries=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2), load_format=st.sampled_from(["auto", "dummy"]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_an_entry_says_the_model_is_made_or_refused(tools, changed, monkeypatch, entries, load_format) -> None:
    monkeypatch.setattr(loading, "memory_total", lambda: 1 << 25)
    complaint = refusal_of(tools.settings_for(changed(**entries), load_format=load_format, threads=2))
    assert complaint is None or complaint.kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.FAILED_PRECONDITION)


def refusal_of(settings_of: WorkerSettings) -> TrivetError | None:
    try:
        prepare_model(settings_of).fill()
    except TrivetError as error:
        return error
    return None
