"""What a checkpoint must hold, what it may hold, and that a tied matrix is there once."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from trivet_proto.errors import ErrorKind, TrivetError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def rewrite(folder, change) -> None:
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def untied(tools, tmp_path):
    tools.write_llama(tmp_path, tie_word_embeddings=False)
    return tmp_path


@pytest.fixture
def tied(tools, tmp_path):
    tools.write_llama(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_ends_the_start_with_its_name(untied, load, name) -> None:
    rewrite(untied, lambda tensors: tensors.pop(name))
    with pytest.raises(TrivetError, match=name) as error:
        load(untied)
    assert error.value.kind is ErrorKind.FAILED_PRECONDITION


def test_a_tensor_of_another_shape_ends_the_start_with_both_shapes(untied, load) -> None:
    def change(tensors) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 60)

    rewrite(untied, change)
    with pytest.raises(TrivetError, match=r"down_proj.*\[48, 60\].*\[48, 64\]"):
        load(untied)


def test_a_tied_head_is_the_embedding_itself(tied, load, tools) -> None:
    loaded = load(tied)
    assert loaded.runner._model.head is None
    plain = tools.StepDriver(loaded)
    tokens = plain.run(plain.request(PROMPT, temperature=0.0), 8)
    # A copy of the head beside it changes nothing.
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    again = tools.StepDriver(load(tied))
    assert again.run(again.request(PROMPT, temperature=0.0), 8) == tokens


def test_a_different_head_beside_a_tied_config_is_warned_of_and_not_used(tied, load, tools, caplog) -> None:
    plain = tools.StepDriver(load(tied))
    tokens = plain.run(plain.request(PROMPT, temperature=0.0), 8)
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": torch.randn(tools.VOCABULARY, 48)}))
    with caplog.at_level(logging.WARNING):
        other = tools.StepDriver(load(tied))
    assert "lm_head.weight differs" in caplog.text
    assert other.run(other.request(PROMPT, temperature=0.0), 8) == tokens


def test_tensors_that_the_model_does_not_need_are_named_and_skipped(tied, load, caplog) -> None:
    rewrite(tied, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "extra": torch.ones(1)}))
    with caplog.at_level(logging.WARNING):
        load(tied)
    assert "1 tensors of the checkpoint are not used, among them extra" in caplog.text


def test_dummy_weights_need_no_tensors_of_the_right_shape(tied, load, tools) -> None:
    rewrite(tied, lambda tensors: tensors.pop("model.norm.weight"))
    driver = tools.StepDriver(load(tied, load_format="dummy"))
    assert len(driver.run(driver.request(PROMPT, temperature=0.0), 3)) == 3


def test_an_architecture_that_is_not_served_is_refused_by_name(tied, load) -> None:
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "architectures": ["UnheardOfForCausalLM"]}))
    with pytest.raises(TrivetError, match="UnheardOfForCausalLM is not served; served are LlamaForCausalLM"):
        load(tied)


def test_more_context_than_the_model_has_is_refused(tied, load) -> None:
    with pytest.raises(TrivetError, match="max_model_len: 129 is above the model's context of 128"):
        load(tied, max_model_len=129)
