"""The forms in which a model runs: layers over the native operators, a whole native step, layers in plain torch; and which one is taken."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, unpack_i32
from trivet_worker.attention import backends
from trivet_worker.models import native_llama

try:
    native_library()
except NotBuilt as missing:
    pytest.skip(str(missing), allow_module_level=True)

LAYERS_OVER_CPU = {"block_size": 16, "attention_backend": "cpu", "model_form": "layers"}
LAYERS_IN_TORCH = {"block_size": 16, "attention_backend": "torch"}
NATIVE_SHAPE = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
VARIANTS = {
    "tied": {},
    "own head, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "an inner size of 70": {"intermediate_size": 70},
    "another activation": {"hidden_act": "gelu_pytorch_tanh"},
    "a sliding window": {"sliding_window": 11, "head_dim": 32},
}
WITHOUT_NATIVE_STEP = ("an inner size of 70", "another activation")
PROMPT = [5, 17, 42, 9, 63, 2, 88, 31, 70, 11, 29, 54, 8, 90, 33, 21, 6, 77, 14]


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request, tools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("form")
    return request.param, tools.write_llama(folder, **{**NATIVE_SHAPE, **VARIANTS[request.param]}), folder


@pytest.fixture(scope="module")
def folder(tools, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("native")
    tools.write_llama(made, **NATIVE_SHAPE)
    return made


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def assert_close(got, wanted) -> None:
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("form", [LAYERS_OVER_CPU, LAYERS_IN_TORCH], ids=["cpu", "torch"])
def test_layers_give_the_logits_and_greedy_tokens_of_transformers(variant, form, tools, load) -> None:
    _, model, folder = variant
    driver = tools.StepDriver(load(folder, **form))
    long, short = PROMPT * 2, PROMPT[:3]
    whole = driver.request(long, **tools.ALL_LOGITS, room=80)
    chunked = driver.request(long, scheduled=18, **tools.ALL_LOGITS, room=80)
    assert_close(tools.logit_rows(driver.step([whole, chunked]))[0], reference(model, long)[-1])
    other = driver.request(short, **tools.ALL_LOGITS)
    rows = tools.logit_rows(driver.step([other], [(whole.handle, 38, 1), (chunked.handle, 18, 20)]))
    assert_close(rows[0], reference(model, short)[-1])
    assert_close(rows[2], reference(model, long)[-1])
    generated = driver.run(driver.request(long, temperature=0.0, room=80), 12)
    assert generated == reference(model, long + generated)[37:49].argmax(axis=1).tolist()


def test_a_model_without_a_native_step_runs_on_the_native_operators_unasked(variant, load, caplog) -> None:
    name, _, folder = variant
    with caplog.at_level(logging.INFO):
        loaded = load(folder, block_size=16)
    assert loaded.backend is backends.CPU
    assert loaded.layers[0].spec.full_attention.sliding_window == (11 if name == "a sliding window" else 0)
    if name in WITHOUT_NATIVE_STEP:
        assert "the model runs layer by layer, not as a whole native step" in caplog.text


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_dtype": "int8"}], ids=str)
def test_a_position_has_the_same_bits_however_its_tokens_came(folder, changes, tools, load) -> None:
    driver = tools.StepDriver(load(folder, **LAYERS_OVER_CPU, **changes), num_blocks=128)
    request = driver.request(PROMPT, **tools.ALL_LOGITS)
    rows = [tools.logit_rows(driver.step([request]))[0]]
    tokens = []
    for index in range(6):
        result = driver.step(known=[(request.handle, len(PROMPT) + index, 1)])
        rows.append(tools.logit_rows(result)[0])
        tokens += unpack_i32(result.token_ids).tolist()
    first = int(rows[0].argmax())
    for index, decoded in enumerate(rows):
        ids = PROMPT + [first, *tokens][:index]
        alone = driver.request(ids, **tools.ALL_LOGITS)
        prefilled = tools.logit_rows(driver.step([alone]))[0]
        chunked = driver.request(ids, scheduled=7, **tools.ALL_LOGITS)
        others = [driver.request(PROMPT[begin:], **tools.ALL_LOGITS) for begin in (3, 18)]
        driver.step([chunked])
        in_batch = tools.logit_rows(driver.step(others, [(chunked.handle, 7, len(ids) - 7)]))[2]
        assert prefilled.tobytes() == decoded.tobytes() == in_batch.tobytes()
        driver.step(finished=[alone.handle, chunked.handle, *(other.handle for other in others)])


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_layers_and_the_whole_step_agree(folder, changes, tools, load) -> None:
    """The same operators in another frame: what differs is the order of sums in the last bits at most."""
    rows = []
    for form in ("layers", "native"):
        driver = tools.StepDriver(load(folder, block_size=16, model_form=form, **changes))
        rows.append(tools.logit_rows(driver.step([driver.request(PROMPT, **tools.ALL_LOGITS)]))[0])
    assert np.abs(rows[0] - rows[1]).max() <= 2e-3 * np.abs(rows[1]).max()


def test_a_native_step_that_is_asked_for_and_cannot_be_is_refused_with_the_reason(folder, tools, load, tmp_path) -> None:
    tools.write_llama(tmp_path, **NATIVE_SHAPE, intermediate_size=70)
    with pytest.raises(TrivetError, match=r"model_form native: no inner size of 70: .* Take model_form auto or layers"):
        load(tmp_path, block_size=16, model_form="native")
    with pytest.raises(TrivetError, match="model_form native: the attention backend torch has none"):
        load(folder, model_form="native", **LAYERS_IN_TORCH)


def test_without_the_native_library_torch_runs_and_the_log_says_why(folder, tools, load, caplog, monkeypatch) -> None:
    def not_built() -> None:
        raise NotBuilt("the native operators are not built: install a C++ compiler")

    for module in (backends, native_llama):
        monkeypatch.setattr(module, "native_library", not_built)
    with caplog.at_level(logging.INFO):
        loaded = load(folder, block_size=16)
    assert loaded.backend is backends.TORCH
    assert "attention backend cpu is not taken: the native operators are not built: install a C++ compiler" in caplog.text
    assert len(tools.StepDriver(loaded).run(tools.StepDriver(loaded).request(PROMPT, temperature=0.0), 3)) == 3
    with pytest.raises(TrivetError, match="attention_backend cpu does not serve this model: cpu: the native operators are not built"):
        load(folder, block_size=16, attention_backend="cpu")


def test_blocks_are_copied_and_zeroed_whole_whatever_their_layout(folder, tools, load) -> None:
    """A request over copies of another's blocks goes on from where that one was."""
    driver = tools.StepDriver(load(folder, **LAYERS_OVER_CPU))
    request = driver.request(PROMPT, **tools.ALL_LOGITS)
    wanted = tools.logit_rows(driver.step([request]))[0]
    other = driver.request(PROMPT, scheduled=1, **tools.ALL_LOGITS)
    other.num_computed_tokens = len(PROMPT) - 1
    blocks, copies = (unpack_i32(one.block_ids)[:2].copy() for one in (request, other))
    result = driver.step([other], copy_sources=pack_i32(blocks), copy_targets=pack_i32(copies))
    assert tools.logit_rows(result)[0].tobytes() == wanted.tobytes()
    driver.step(finished=[request.handle], blocks_to_zero=pack_i32(blocks))
    for cache in driver.runner._caches.values():
        assert not cache[blocks].any()
        assert cache[copies].flatten(1).any(dim=1).all()
