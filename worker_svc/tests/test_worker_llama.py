"""The model against transformers' own, float32: prefill, chunks, decode, batches."""

import numpy as np
import pytest
import torch
from trivet_proto.packing import unpack_i32

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "grouped heads, tied": {},
    "own head, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "one head for all, other head size": {"num_key_value_heads": 1, "head_dim": 16},
    "rotary scaling of Llama 3": {"rope_parameters": LLAMA3},
    "linear rotary scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
}


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def assert_close(got, wanted, tolerance=1e-4) -> None:
    limit = tolerance * np.abs(wanted).max()
    assert np.abs(got - wanted).max() <= limit


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request, tools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("variant")
    return tools.write_llama(folder, **VARIANTS[request.param]), folder


def test_prefill_chunks_decode_and_batches_give_the_logits_of_transformers(variant, tools, load) -> None:
    model, folder = variant
    driver = tools.StepDriver(load(folder))
    rng = np.random.default_rng(3)
    long, short, other = (rng.integers(0, tools.VOCABULARY, count).tolist() for count in (23, 3, 9))

    whole = driver.request(long, **tools.ALL_LOGITS)
    assert_close(tools.logit_rows(driver.step([whole]))[0], reference(model, long)[-1])

    # A second copy in chunks, beside decodes of the first and prompts of two others.
    chunked = driver.request(long, scheduled=5, **tools.ALL_LOGITS)
    assert len(driver.step([chunked], [(whole.handle, 23, 1)]).token_ids) == 4
    others = [driver.request(ids, **tools.ALL_LOGITS) for ids in (short, other)]
    rows = tools.logit_rows(driver.step(others, [(whole.handle, 24, 1), (chunked.handle, 5, 11)]))
    assert_close(rows[0], reference(model, short)[-1])
    assert_close(rows[1], reference(model, other)[-1])
    last = driver.step(known=[(chunked.handle, 16, 7), (whole.handle, 25, 1), (others[0].handle, 3, 1)])
    assert_close(tools.logit_rows(last)[0], reference(model, long)[-1])

    generated = driver.run(driver.request(long, temperature=0.0), 12)
    logits = reference(model, long + generated)
    assert generated == logits[22:34].argmax(axis=1).tolist()


def test_decodes_of_very_different_lengths_do_not_disturb_each_other(llama_folder, tools, load) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_folder).float().eval()
    driver = tools.StepDriver(load())
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, tools.VOCABULARY, count).tolist() for count in (2, 31, 7, 17)]
    requests = [driver.request(ids, **tools.ALL_LOGITS) for ids in prompts]
    first = unpack_i32(driver.step(requests).token_ids).tolist()
    rows = tools.logit_rows(driver.step(known=[(request.handle, len(ids), 1) for request, ids in zip(requests, prompts, strict=True)]))
    for ids, token, row in zip(prompts, first, rows, strict=True):
        assert_close(row, reference(model, [*ids, token])[-1])


def test_bfloat16_is_no_further_from_float32_than_transformers_own(tools, load, llama_folder) -> None:
    """Over many prompts, prefill and decode: the root of the mean squared distance, and none of ours may be 1.2 times theirs."""
    from transformers import LlamaForCausalLM

    exact = LlamaForCausalLM.from_pretrained(llama_folder).float().eval()
    theirs = LlamaForCausalLM.from_pretrained(llama_folder).to(torch.bfloat16).eval()
    driver = tools.StepDriver(load(dtype="bfloat16"), num_blocks=256)
    rng = np.random.default_rng(11)
    ours_off, theirs_off = [], []
    for _ in range(12):
        ids = rng.integers(0, tools.VOCABULARY, 20).tolist()
        request = driver.request(ids, **tools.ALL_LOGITS)
        results = [driver.step([request]), driver.step(known=[(request.handle, 20, 1)])]
        driver.step(finished=[request.handle])
        for step, result in enumerate(results):
            seen = ids if step == 0 else ids + unpack_i32(results[0].token_ids).tolist()
            wanted = reference(exact, seen)[-1]
            with torch.no_grad():
                other = theirs(torch.tensor([seen])).logits[0, -1].float().numpy()
            ours_off.append(tools.logit_rows(result)[0] - wanted)
            theirs_off.append(other - wanted)
    ours, others = (float(np.sqrt(np.mean(np.square(off)))) for off in (ours_off, theirs_off))
    assert ours <= 1.2 * others, (ours, others)
