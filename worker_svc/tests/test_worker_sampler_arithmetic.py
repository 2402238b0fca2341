"""Sampling against arithmetic written out: order, penalties, filters with ties, noise, and what must not take a step with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trivet_kernels.cpu.sampling import SamplingRows
from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.v1 import types_pb2
from trivet_worker.sampling import noise
from trivet_worker.sampling.logprobs import FLOOR
from trivet_worker.sampling.noise import gumbel, natural_log, row_keys
from trivet_worker.sampling.params import SamplingColumns
from trivet_worker.sampling.plain import FLAG_NON_FINITE, PlainSampler
from trivet_worker.sampling.processors import ActiveProcessors
from trivet_worker.sampling.sampler import Sampled, Sampler, choose_operators

VOCABULARY = 40
EOS = 2
CHI_SQUARE_999 = {15: 37.7, 255: 330.5}  # degrees of freedom → value passed once in a thousand


def draw(logits, rows, *, output=(), prompt=(5, 6)) -> Sampled:
    """Sample rows of `logits`, each (seed, parameters); all share the ids so far. Natively and written out, which must agree."""
    logits = torch.as_tensor(np.array(logits), dtype=torch.float32)
    columns = SamplingColumns(len(rows), logits.shape[1])
    ids = np.array([*prompt, *output], dtype=np.int32)
    for slot, (seed, params) in enumerate(rows):
        sampling = types_pb2.SamplingParams(**params)
        columns.put(slot, sampling, seed, columns.extras_of(sampling, pack_i32([EOS])))
    table = np.zeros((len(rows), 64), dtype=np.int32)
    table[:, : len(ids)] = ids
    lengths = np.full(len(rows), len(ids))
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


def processed(logits, params, **ids) -> np.ndarray:
    """The scores that all masks, biases and penalties leave."""
    everything = {**params, "temperature": 0.0, "logprobs": VOCABULARY, "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS}
    logprobs = draw(logits[None], [(1, everything)], **ids).logprobs
    assert logprobs is not None
    row = np.empty(VOCABULARY, dtype=np.float32)
    row[logprobs.token_ids[1:]] = logprobs.values[1:]
    return row


def written_out(logits, *, prompt, output, allowed, bias, repetition, presence, frequency, min_tokens) -> np.ndarray:
    """The order of the specification, token by token, in float64."""
    row = logits.astype(np.float64)
    for token in range(VOCABULARY):
        if allowed and token not in allowed:
            row[token] = -np.inf
        if token == EOS and len(output) < min_tokens:
            row[token] = -np.inf
        row[token] += bias.get(token, 0.0)
        if token in prompt or token in output:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= frequency * output.count(token)
        row[token] -= presence * (token in output)
    return np.where(np.isinf(row), FLOOR, row)


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10**6), prompt=tokens.filter(bool), output=tokens, allowed=st.sets(st.integers(3, VOCABULARY - 1), max_size=20),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=5),
    repetition=st.sampled_from([1.0, 1.5, 0.5]), presence=st.sampled_from([0.0, 2.0, -1.0]), frequency=st.sampled_from([0.0, 0.7]),
    min_tokens=st.integers(0, 6),
)  # fmt: skip
def test_masks_biases_and_penalties_are_applied_in_the_order_of_the_specification(
    seed, prompt, output, allowed, bias, repetition, presence, frequency, min_tokens
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)
    params = {
        "allowed_token_ids": pack_i32(sorted(allowed)),
        "logit_bias_ids": pack_i32(list(bias)),
        "logit_bias_values": pack_f32(list(bias.values())),
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "min_tokens": min_tokens,
    }
    wanted = written_out(
        logits, prompt=prompt, output=output, allowed=allowed, bias=bias, repetition=repetition,
        presence=presence, frequency=np.float32(frequency), min_tokens=min_tokens,
    )  # fmt: skip
    np.testing.assert_allclose(processed(logits, params, prompt=prompt, output=output), wanted, atol=1e-4)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6), size=st.sampled_from([7, 700, 5000]), top_k=st.sampled_from([0, 1, 3, 600]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 1e-4]), step=st.sampled_from([0.5, 0.01]),
)  # fmt: skip
def test_top_k_and_top_p_leave_exactly_the_written_out_set_ties_included(seed, size, top_k, top_p, step) -> None:
    """On a grid of scores there are many equals; of those the lowest ids stay."""
    row = np.round(np.random.default_rng(seed).normal(0, 2, size) / step) * step
    order = np.argsort(-row, kind="stable")[: min(top_k, size) or size]
    shares = np.exp(row[order] - row.max())
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    wanted = [int(order[0]), *(int(token) for token, share in zip(order[1:], before[1:], strict=True) if share < top_p)]
    everything = {"all_logprobs": True, "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS}
    logprobs = draw(row[None], [(1, {"top_k": top_k, "top_p": top_p, **everything})]).logprobs
    assert logprobs is not None
    got = logprobs.token_ids[1:][logprobs.values[1:] > FLOOR].tolist()
    # Sums of float64 in another order may place the edge one token apart.
    edge = int(np.searchsorted(before, top_p))
    assert got == wanted or (abs(before[min(edge, len(before) - 1)] - top_p) < 1e-6 and abs(len(got) - len(wanted)) <= 1)


@pytest.mark.parametrize("params", [{"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-4}, {"temperature": 1e-12}])
@pytest.mark.parametrize("size", [VOCABULARY, 5000])
def test_equal_logits_as_in_half_precision_go_to_the_greedy_token(params, size) -> None:
    logits = torch.randn(12, size, generator=torch.Generator().manual_seed(3)).mul(2).round().numpy()
    assert ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).any()
    greedy = draw(logits, [(seed, {"temperature": 0.0}) for seed in range(12)]).tokens
    assert draw(logits, [(seed, params) for seed in range(12)]).tokens.tolist() == greedy.tolist()
    assert greedy.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bias_that_is_not_a_number_flags_its_row_alone(value) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (2, VOCABULARY)).astype(np.float32)
    broken = {"logit_bias_ids": pack_i32([4]), "logit_bias_values": pack_f32([value])}
    got = draw(logits, [(1, broken), (2, {"temperature": 0.0})])
    assert got.flags.tolist() == [FLAG_NON_FINITE, 0]
    assert int(got.tokens[1]) == int(logits[1].argmax())


def test_ids_outside_the_vocabulary_do_nothing() -> None:
    logits = np.random.default_rng(1).normal(0, 1, VOCABULARY).astype(np.float32)
    strangers = [VOCABULARY, -1, 10**6]
    params = {
        "logit_bias_ids": pack_i32([*strangers, 7]),
        "logit_bias_values": pack_f32([50.0, 50.0, 50.0, 50.0]),
        "bad_words_ids": pack_i32(strangers),
        "bad_words_counts": pack_i32([2, 1]),
        "stop_token_ids": pack_i32(strangers),
        "min_tokens": 4,
    }
    row = processed(logits, params)
    changed = np.flatnonzero(np.abs(row - logits) > 1e-3).tolist()
    assert changed == [EOS, 7]  # the end, since min_tokens; and the one bias that means something
    allowed = processed(logits, {"allowed_token_ids": pack_i32([*strangers, 9])})
    assert np.flatnonzero(allowed > FLOOR).tolist() == [9]


def test_a_models_own_masks_are_no_fault() -> None:
    logits = np.full((1, VOCABULARY), -np.inf, dtype=np.float32)
    logits[0, [3, 8]] = [1.0, 1.5]
    got = draw(np.tile(logits, (50, 1)), [(seed, {"logprobs": 3}) for seed in range(50)])
    assert not got.flags.any()
    assert set(got.tokens.tolist()) == {3, 8}
    assert got.logprobs is not None
    assert np.isfinite(got.logprobs.values).all()


def test_logprobs_of_broken_scores_are_the_floor_never_nan() -> None:
    logits = np.array([[np.nan, 0.0, -np.inf] + [1.0] * 200], dtype=np.float32)
    logprobs = draw(logits, [(1, {"logprobs": 0})]).logprobs
    assert logprobs is not None
    assert logprobs.values.tolist() == [FLOOR]


def test_the_native_noise_has_the_bits_of_the_written_out_one() -> None:
    """Flat logits leave the choice to the noise alone: over many seeds and sizes the winners are those of the definition."""
    for size in (8, 15, 64, 3001):
        seeds = np.arange(40, dtype=np.uint64) * 977
        got = draw(np.zeros((40, size), dtype=np.float32), [(int(seed), {}) for seed in seeds]).tokens
        keys = row_keys(seeds, np.full(40, 2))
        assert got.tolist() == gumbel(keys[:, None], np.arange(size)[None]).argmax(axis=1).tolist()


def test_the_logarithm_is_right_to_the_last_place() -> None:
    values = np.concatenate([np.random.default_rng(2).random(20000), [2.0**-53, 1 - 2.0**-53, 0.5, 36.7]])
    np.testing.assert_array_max_ulp(natural_log(values), np.log(values), maxulp=2)


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("skew", [0.0, 0.2])
def test_samples_pass_a_chi_square_test_over_seeds_and_over_positions(vary, skew) -> None:
    count, size = 16000, 16
    logits = -skew * np.arange(size)
    varying, fixed = np.arange(count), np.full(count, 7)
    seeds, positions = (varying, fixed) if vary == "seeds" else (fixed, varying)
    keys = row_keys(seeds.astype(np.uint64), positions)
    picked = (logits + gumbel(keys[:, None], np.arange(size)[None])).argmax(axis=1)
    expected = count * np.exp(logits) / np.exp(logits).sum()
    assert float((np.square(np.bincount(picked, minlength=size) - expected) / expected).sum()) < CHI_SQUARE_999[size - 1]


def test_samples_at_neighbouring_positions_are_independent() -> None:
    """Pairs of consecutive samples fill a 16 × 16 table evenly."""
    keys = row_keys(np.full(40001, 123, dtype=np.uint64), np.arange(40001))
    picked = gumbel(keys[:, None], np.arange(16)[None]).argmax(axis=1)
    pairs = np.bincount(picked[:-1] * 16 + picked[1:], minlength=256)
    expected = 40000 / 256
    assert float((np.square(pairs - expected) / expected).sum()) < CHI_SQUARE_999[255]


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_for_every_outcome_of_the_hash(bits, monkeypatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda values: np.full_like(values, bits))
    assert np.isfinite(gumbel(np.array([1], dtype=np.uint64), np.arange(3))).all()


def test_a_seed_of_zero_and_the_greatest_are_seeds_like_others() -> None:
    logits = np.zeros((3, VOCABULARY), dtype=np.float32)
    once = [draw(logits, [(seed, {}) for seed in (0, 2**64 - 1, 2**63)], output=(1,) * length).tokens.tolist() for length in range(12)]
    again = [draw(logits, [(seed, {}) for seed in (0, 2**64 - 1, 2**63)], output=(1,) * length).tokens.tolist() for length in range(12)]
    assert once == again
    assert len({tuple(column) for column in zip(*once, strict=True)}) == 3
