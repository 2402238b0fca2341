"""Sampling on given logits: order, masks, filters, noise, logprobs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trivet_kernels.cpu.sampling import SamplingRows
from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.v1 import types_pb2
from trivet_worker.sampling.logprobs import FLOOR
from trivet_worker.sampling.noise import gumbel, row_keys
from trivet_worker.sampling.params import SamplingColumns
from trivet_worker.sampling.plain import FLAG_ALL_MASKED, FLAG_NON_FINITE, PlainSampler
from trivet_worker.sampling.processors import ActiveProcessors
from trivet_worker.sampling.sampler import Sampled, Sampler, choose_operators

VOCABULARY = 1200  # more than the sampler looks at first
EOS = 2


def draw(logits, rows, *, output=(), prompt=(5, 6), position=None) -> Sampled:
    """Sample rows of `logits`, each (seed, parameters); all share the ids so far. Natively and written out, which must agree."""
    logits = torch.as_tensor(np.array(logits), dtype=torch.float32)
    columns = SamplingColumns(len(rows), logits.shape[1])
    ids = np.array([*prompt, *output], dtype=np.int32)
    for slot, (seed, params) in enumerate(rows):
        sampling = types_pb2.SamplingParams(**params)
        columns.put(slot, sampling, seed, columns.extras_of(sampling, pack_i32([EOS])))
    table = np.zeros((len(rows), 64), dtype=np.int32)
    table[:, : len(ids)] = ids
    lengths = np.full(len(rows), len(ids) if position is None else position)
    step = SamplingRows(np.arange(len(rows)), lengths, np.full(len(rows), len(prompt)), table)
    both = [choose_operators(columns, logits.shape[1], 2), PlainSampler(columns.constraints.get)]
    got, written_out = [Sampler(columns, operators, ActiveProcessors((), 1)).sample(logits.clone(), step) for operators in both]
    assert (got.flags == written_out.flags).all()
    assert (got.tokens == written_out.tokens).all()
    if got.logprobs is not None:
        assert (got.logprobs.token_ids == written_out.logprobs.token_ids).all()
        assert (got.logprobs.ranks == written_out.logprobs.ranks).all()
        np.testing.assert_allclose(got.logprobs.values, written_out.logprobs.values, rtol=1e-6, atol=1e-6)
    return got


def random_logits(rows: int, seed: int = 0, spread: float = 3.0):
    return np.random.default_rng(seed).normal(0, spread, (rows, VOCABULARY)).astype(np.float32)


def one(params, logits, *, seed=1, **others) -> int:
    return int(draw(logits[None], [(seed, params)], **others).tokens[0])


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 5e-6}, {"temperature": 1e-4}, {"top_p": 1e-4}, {"top_k": 1}])
def test_what_is_greedy_in_effect_gives_the_argmax(params) -> None:
    logits = random_logits(16)
    got = draw(logits, [(seed, params) for seed in range(16)])
    assert got.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert not got.flags.any()


def test_a_row_is_the_same_whatever_it_is_batched_with() -> None:
    logits = random_logits(6)
    kinds = [{}, {"top_p": 0.9}, {"top_k": 7}, {"temperature": 0.0}, {"min_p": 0.1}, {"top_p": 0.99999, "temperature": 2.0}]
    together = draw(logits, list(enumerate(kinds)))
    for row, params in enumerate(kinds):
        assert int(together.tokens[row]) == one(params, logits[row], seed=row)


def test_seed_and_position_alone_decide_the_noise() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    assert one({}, logits, seed=0) == one({}, logits, seed=0)
    assert len({one({}, logits, seed=seed) for seed in range(20)}) > 15
    assert len({one({}, logits, seed=3, position=position) for position in range(2, 22)}) > 15


def test_noise_is_gumbel_so_that_samples_follow_the_softmax() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    keys = row_keys(np.arange(20000, dtype=np.uint64), np.full(20000, 9))
    tokens = (np.log(probabilities) + gumbel(keys[:, None], np.arange(4)[None])).argmax(axis=1)
    shares = np.bincount(tokens, minlength=4) / 20000
    assert np.abs(shares - probabilities).max() < 0.015


def allowed_by(row, *, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """The filters written out in float64."""
    scores = row.astype(np.float64)
    probabilities = np.exp(scores - scores.max())
    candidates = [index for index in np.argsort(-scores, kind="stable") if probabilities[index] >= min_p]
    candidates = candidates[:top_k] if top_k else candidates
    shares = probabilities[candidates] / probabilities[candidates].sum()
    before = np.cumsum(shares) - shares
    return {int(index) for index, share in zip(candidates, before, strict=True) if share < top_p - 1e-9 or index == candidates[0]}


@settings(deadline=None, max_examples=60)
@given(
    top_k=st.sampled_from([0, 1, 5, 600]), top_p=st.sampled_from([1.0, 0.999, 0.9, 0.2]), min_p=st.sampled_from([0.0, 0.05]),
    spread=st.sampled_from([0.1, 2.0, 8.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_filters_leave_what_arithmetic_written_out_leaves(top_k, top_p, min_p, spread, seed) -> None:
    row = random_logits(1, seed, spread)[0]
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    wanted = allowed_by(row, **params)
    got = draw(np.tile(row, (8, 1)), [(seed + index, params) for index in range(8)])
    assert set(got.tokens.tolist()) <= wanted


def test_masks_hold_and_biases_shift() -> None:
    logits = random_logits(1)[0]
    best = int(logits.argmax())
    assert one({"temperature": 0.0, "allowed_token_ids": pack_i32([4, 9])}, logits) in (4, 9)
    raised = {"temperature": 0.0, "logit_bias_ids": pack_i32([77]), "logit_bias_values": pack_f32([100.0])}
    assert one(raised, logits) == 77
    lowered = {"temperature": 0.0, "logit_bias_ids": pack_i32([best]), "logit_bias_values": pack_f32([-100.0])}
    assert one(lowered, logits) != best


def test_bad_words_mask_their_last_id_only_after_the_others_in_the_output() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[40] = 9.0
    params = {"temperature": 0.0, "bad_words_ids": pack_i32([30, 40, 50]), "bad_words_counts": pack_i32([2, 1])}
    assert one(params, logits) == 40
    assert one(params, logits, output=(30,)) != 40
    assert one(params, logits, prompt=(5, 30)) == 40  # the word began in the prompt
    logits[50] = 10.0
    assert one(params, logits, output=(7,)) == 40


def test_min_tokens_mask_the_end_until_there_are_enough() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[[EOS, 60, 61]] = [9.0, 8.0, 7.0]
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": pack_i32([60])}
    assert one(params, logits, output=(4,)) == 61
    assert one(params, logits, output=(4, 4)) == EOS


def test_penalties_count_the_tokens_that_they_say() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[[5, 70, 71, 72]] = [4.0, 3.9, 3.0, 2.5]  # 5 is in the prompt
    assert one({"temperature": 0.0, "repetition_penalty": 1.5}, logits) == 70
    assert one({"temperature": 0.0, "repetition_penalty": 1.5}, logits, output=(70,)) == 71
    assert one({"temperature": 0.0, "presence_penalty": 2.0}, logits) == 5  # the prompt does not count
    assert one({"temperature": 0.0, "presence_penalty": 2.0}, logits, output=(5, 70)) == 71
    assert one({"temperature": 0.0, "frequency_penalty": 0.5}, logits, output=(5, 70, 70)) == 5
    negative = np.full(VOCABULARY, -5.0, dtype=np.float32)
    negative[[5, 70]] = [-1.0, -1.2]
    assert one({"temperature": 0.0, "repetition_penalty": 1.5}, negative) == 70


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_is_flagged_and_its_neighbours_are_not_touched(broken) -> None:
    logits = random_logits(3)
    logits[1, 17] = broken
    got = draw(logits, [(seed, {"logprobs": 2}) for seed in range(3)])
    assert got.flags.tolist() == [0, FLAG_NON_FINITE, 0]
    assert int(got.tokens[0]) == one({}, logits[0], seed=0)
    assert int(got.tokens[2]) == one({}, logits[2], seed=2)


def test_a_row_with_nothing_left_is_flagged_alone() -> None:
    logits = random_logits(2)
    params = {"allowed_token_ids": pack_i32([EOS]), "min_tokens": 3}
    got = draw(logits, [(1, params), (1, {"temperature": 0.0})])
    assert got.flags.tolist() == [FLAG_ALL_MASKED, 0]


def test_logprobs_are_raw_finite_and_ranked() -> None:
    logits = random_logits(3)
    params = {"temperature": 0.7, "logprobs": 3, "logit_bias_ids": pack_i32([8]), "logit_bias_values": pack_f32([100.0])}
    got = draw(logits, [(1, params), (2, {"temperature": 0.0}), (3, {"logprobs": 0, "temperature": 0.0})])
    assert got.logprob_rows.tolist() == [0, 2]
    logprobs = got.logprobs
    assert logprobs is not None
    assert logprobs.counts.tolist() == [4, 1]
    wanted = torch.log_softmax(torch.tensor(logits), dim=1).numpy()
    order = np.argsort(-logits[0])
    assert logprobs.token_ids.tolist() == [8, *order[:3].tolist(), int(logits[2].argmax())]
    np.testing.assert_allclose(logprobs.values[:4], wanted[0, [8, *order[:3]]], atol=1e-5)
    assert logprobs.ranks.tolist() == [int(np.flatnonzero(order == 8)[0]) + 1, 1]


def test_processed_logprobs_show_masks_with_the_floor() -> None:
    logits = random_logits(1)
    params = {
        "temperature": 0.0, "logprobs": 3, "allowed_token_ids": pack_i32([4, 9]),
        "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS,
    }  # fmt: skip
    logprobs = draw(logits, [(1, params)]).logprobs
    assert logprobs is not None
    assert set(logprobs.token_ids[:3].tolist()) == {4, 9}
    assert logprobs.values[3] == FLOOR
    assert np.isfinite(logprobs.values).all()


@pytest.mark.parametrize("mode", [types_pb2.LOGPROBS_MODE_RAW_LOGPROBS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS])
def test_prompt_logprobs_are_those_of_the_targets(mode) -> None:
    logits = torch.tensor(random_logits(5))
    columns = SamplingColumns(1, VOCABULARY)
    columns.logprobs_mode[0] = mode
    wanted = torch.log_softmax(logits, dim=1) if mode == types_pb2.LOGPROBS_MODE_RAW_LOGPROBS else logits
    for operators in (choose_operators(columns, VOCABULARY, 2), PlainSampler(columns.constraints.get)):
        sampler = Sampler(columns, operators, ActiveProcessors((), 1))
        got = sampler.prompt_logprobs(logits, np.array([1, 2, 3, 4, 5], dtype=np.int32), 0, 2)
        assert got.counts.tolist() == [3] * 5
        values, ids = got.values.reshape(5, 3), got.token_ids.reshape(5, 3)
        np.testing.assert_allclose(values[:, 0], wanted[torch.arange(5), torch.arange(1, 6)].numpy(), atol=2e-6)
        assert ids[:, 1:].tolist() == torch.topk(logits, 2, dim=1).indices.tolist()


def processed_row(logits, params, **others) -> np.ndarray:
    """All processed scores by id."""
    logprobs = draw(logits[None], [(5, {**params, "all_logprobs": True})], **others).logprobs
    assert logprobs is not None
    assert logprobs.counts.tolist() == [VOCABULARY + 1]
    row = np.empty(VOCABULARY, dtype=np.float32)
    row[logprobs.token_ids[1:]] = logprobs.values[1:]
    return row


def test_processed_logprobs_are_taken_after_temperature_and_filters() -> None:
    logits = random_logits(1)[0]
    best = np.sort(logits)[::-1]
    params = {"temperature": 0.5, "top_k": 3}
    scores = processed_row(logits, {**params, "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS})
    np.testing.assert_allclose(np.sort(scores)[::-1][:3], best[:3] / 0.5, rtol=1e-5)
    assert (np.sort(scores)[::-1][3:] == FLOOR).all()
    shares = np.exp(processed_row(logits, {**params, "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS}).astype(np.float64))
    wanted = np.exp(best[:3] / 0.5 - best[0] / 0.5)
    np.testing.assert_allclose(np.sort(shares)[::-1][:3], wanted / wanted.sum(), rtol=1e-5)
    raw = processed_row(logits, {**params, "logprobs_mode": types_pb2.LOGPROBS_MODE_RAW_LOGITS})
    assert (raw == logits).all()


def test_a_greedy_row_is_neither_scaled_nor_filtered_in_processed_mode() -> None:
    logits = random_logits(1)[0]
    params = {"temperature": 0.0, "top_k": 3, "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS}
    assert (processed_row(logits, params) == logits).all()


def test_logprobs_of_chosen_ids_come_in_the_order_asked() -> None:
    logits = random_logits(3)
    chosen = {"logprob_token_ids": pack_i32([900, 3, 17]), "temperature": 0.0}
    got = draw(logits, [(1, chosen), (2, {"temperature": 0.0}), (3, {**chosen, "logprob_token_ids": pack_i32([8])})])
    assert got.logprob_rows.tolist() == [0, 2]
    assert got.logprobs is not None
    assert got.logprobs.counts.tolist() == [4, 2]
    assert got.logprobs.token_ids.tolist() == [int(logits[0].argmax()), 900, 3, 17, int(logits[2].argmax()), 8]
    wanted = torch.log_softmax(torch.tensor(logits), dim=1).numpy()
    np.testing.assert_allclose(got.logprobs.values[1:4], wanted[0, [900, 3, 17]], atol=2e-6)
    assert got.logprobs.ranks.tolist() == [1, 1]
