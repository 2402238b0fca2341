"""What the native attention adds to a served model: a sliding window, against transformers' Mistral, and an int8 KV cache."""

import numpy as np
import pytest
import torch
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, unpack_i32

try:
    native_library()
except NotBuilt as reason:
    pytest.skip(str(reason), allow_module_level=True)

BLOCK, WINDOW = 16, 21
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def mistral(tools, tmp_path_factory):
    from transformers import MistralConfig, MistralForCausalLM, set_seed

    set_seed(0)
    folder = tmp_path_factory.mktemp("mistral")
    config = MistralConfig(**SHAPE, sliding_window=WINDOW, attn_implementation="eager")
    return tools.save_random(MistralForCausalLM(config), folder), folder


@pytest.fixture(scope="module")
def llama(tools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_native")
    return tools.write_llama(folder, **SHAPE), folder


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def driver_of(tools, load, folder, **changes):
    driver = tools.StepDriver(load(folder, block_size=BLOCK, **changes), num_blocks=512)
    assert driver.loaded.backend.name == "cpu"
    return driver


def request_of(driver, tools, ids, **others):
    """With blocks of this file's size."""
    request = driver.request(ids, room=256, **{**tools.ALL_LOGITS, **others})
    count = 5
    request.block_ids, request.block_counts = pack_i32(unpack_i32(request.block_ids)[:count]), pack_i32([count])
    return request


def test_a_window_gives_the_logits_of_transformers_mistral_prefilled_in_chunks_and_decoded(mistral, tools, load) -> None:
    model, folder = mistral
    ids = np.random.default_rng(3).integers(0, tools.VOCABULARY, 60).tolist()
    wanted = reference(model, ids)
    assert load(folder, block_size=BLOCK).layers[0].spec.full_attention.sliding_window == WINDOW
    driver = driver_of(tools, load, folder)
    whole = tools.logit_rows(driver.step([request_of(driver, tools, ids)]))[0]
    assert np.abs(whole - wanted[-1]).max() <= 1e-4 * np.abs(wanted).max()
    chunked = request_of(driver, tools, ids, scheduled=37)
    driver.step([chunked])
    last = tools.logit_rows(driver.step(known=[(chunked.handle, 37, 23)]))[0]
    assert np.array_equal(last, whole)
    short = request_of(driver, tools, ids[:30])
    token = unpack_i32(driver.step([short]).token_ids).tolist()
    decoded = tools.logit_rows(driver.step(known=[(short.handle, 30, 1)]))[0]
    assert np.abs(decoded - reference(model, ids[:30] + token)[-1]).max() <= 1e-4 * np.abs(wanted).max()


def test_a_window_that_is_never_reached_is_none(mistral, load) -> None:
    _, folder = mistral
    assert not load(folder, block_size=BLOCK, max_model_len=WINDOW).layers[0].spec.full_attention.HasField("sliding_window")
    assert load(folder, max_model_len=WINDOW, attention_backend="torch").backend.name == "torch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_cache_takes_a_byte_a_number_and_keeps_close(llama, tools, load, dtype) -> None:
    model, folder = llama
    ids = np.random.default_rng(4).integers(0, tools.VOCABULARY, 50).tolist()
    wanted = reference(model, ids)[-1]
    driver = driver_of(tools, load, folder, dtype=dtype, kv_dtype="int8")
    loaded = driver.loaded
    assert loaded.card.fingerprint.kv_dtype == "int8"
    assert {layer.spec.page_size_bytes for layer in loaded.layers} == {2 * BLOCK * (2 * 32 + 8)}
    assert {(layer.spec.dtype, bool(layer.spec.quantization)) for layer in loaded.layers} == {("int8", True)}
    whole = tools.logit_rows(driver.step([request_of(driver, tools, ids)]))[0]
    assert 0 < np.abs(whole - wanted).max() <= 0.1 * np.abs(wanted).max()
    chunked = request_of(driver, tools, ids, scheduled=33)
    driver.step([chunked])
    assert np.array_equal(tools.logit_rows(driver.step(known=[(chunked.handle, 33, 17)]))[0], whole)


def test_int8_blocks_are_copied_and_zeroed_with_their_scales(llama, tools, load) -> None:
    _, folder = llama
    ids = np.random.default_rng(5).integers(0, tools.VOCABULARY, 40).tolist()
    driver = driver_of(tools, load, folder, kv_dtype="int8")
    first = request_of(driver, tools, ids)
    wanted = tools.logit_rows(driver.step([first]))[0]
    second = request_of(driver, tools, ids, scheduled=13)
    second.num_computed_tokens = 27  # a block and a part of the first one's
    sources, targets = unpack_i32(first.block_ids)[:2], unpack_i32(second.block_ids)[:2]
    copied = driver.step([second], copy_sources=pack_i32(sources), copy_targets=pack_i32(targets))
    assert np.array_equal(tools.logit_rows(copied)[0], wanted)
    driver.step(finished=[first.handle], blocks_to_zero=pack_i32(sources))
    assert all(bool((cache[sources.tolist()] == 0).all()) for cache in driver.runner._caches.values())


def test_an_int8_cache_that_no_backend_takes_is_refused_with_the_reasons(llama, load) -> None:
    _, folder = llama
    with pytest.raises(TrivetError, match=r"cpu: no blocks of 4 tokens.*; torch: no KV cache in torch\.int8 beside torch\.float32"):
        load(folder, block_size=4, kv_dtype="int8")
