"""Every implementation of the operators against arithmetic written out in float64, over random shapes and ways in which tokens come."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from trivet_kernels import reference
from trivet_kernels.api import AttentionForm, PagedBatch
from trivet_kernels.cpu import operators as cpu
from trivet_kernels.cpu.library import NotBuilt, native_library

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Absolute and relative, of values around one."""
INT8_TOLERANCE = 8e-2
"""Keys and values in eight bits: half a step of the greatest of a head, in scores and in what is summed."""
CASES = [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 24))]
MOST_STEPS = 10  # then all the rest comes at once


def missing(operators) -> str | None:
    try:
        native_library()
    except NotBuilt as reason:
        return str(reason) if operators is cpu else None
    return None


IMPLEMENTATIONS = [
    pytest.param(ops, id=ops.name, marks=pytest.mark.skipif(bool(missing(ops)), reason="not built")) for ops in (reference, cpu)
]
implementations = pytest.mark.parametrize("operators", IMPLEMENTATIONS)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def rotated(states, cosines, sines):
    """`[T, heads, D]` in float64, the halves of each head as the two parts of complex numbers."""
    first, second = states.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cosines.double(), sines.double())[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def plain_attention(query, keys, values, form: AttentionForm):
    """One sequence, float64: query [q, H, D] are the last of keys [n, K, D]."""
    count, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    positions, seen = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
    unseen = seen > positions
    if form.window is not None:
        unseen |= seen <= positions - form.window
    k, v = (states.double().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for states in (keys, values))
    scores = query.double().transpose(0, 1) @ k.transpose(1, 2) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    return (torch.softmax(scores.masked_fill(unseen, -math.inf), dim=-1) @ v).transpose(0, 1)


@dataclass
class Sequence:
    """What one has in all, and how much of it came."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    wanted: torch.Tensor  # float64, of all its tokens
    blocks: list[int]
    done: int = 0


@dataclass
class Case:
    """Sequences that come in random chunks over one cache, whose blocks are spread and held garbage before."""

    seed: int
    dtype: torch.dtype
    block_sizes: tuple[int, ...]
    head_sizes: tuple[int, ...]
    int8: bool = False
    steps: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        pick = self.random.choice
        self.block_size, self.size = int(pick(self.block_sizes)), int(pick(self.head_sizes))
        self.kv_heads, group = int(pick([1, 2, 3])), int(pick([1, 2, 3, 4, 8]))
        self.heads = self.kv_heads * group
        window = int(self.random.integers(1, 200)) if self.seed % 3 == 1 else None
        self.form = AttentionForm(self.size**-0.5, window, 2.0 if self.seed % 4 == 2 else None)
        self.generator = torch.Generator().manual_seed(self.seed)
        angles = torch.rand(600, self.size // 2, generator=self.generator) * 6
        self.cosines, self.sines = angles.cos(), angles.sin()
        lengths = [int(pick([1, 2, self.block_size, self.block_size + 1, 90, 270, 300])) for _ in range(int(pick([1, 2, 5])))]
        counts = [-(-length // self.block_size) for length in lengths]
        free = (self.random.permutation(sum(counts)) + 1).tolist()
        for length, count in zip(lengths, counts, strict=True):
            states = [self.states(length, heads) for heads in (self.heads, self.kv_heads, self.kv_heads)]
            turned = [rotated(part, self.cosines[:length], self.sines[:length]) for part in states[:2]]
            wanted = plain_attention(*turned, states[2], self.form)
            self.sequences.append(Sequence(*states, wanted, [free.pop() for _ in range(count)]))
        content = 2 * self.size + 8 if self.int8 else 2 * self.size
        self.cache = torch.full((1 + sum(counts), self.kv_heads, self.block_size, content), 7).to(torch.int8 if self.int8 else self.dtype)

    def states(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, self.size, generator=self.generator).to(self.dtype)

    @property
    def is_done(self) -> bool:
        return all(sequence.done == len(sequence.keys) for sequence in self.sequences)

    def step(self, operators) -> None:
        """Some tokens of each sequence, of some none; the outputs are compared."""
        self.steps += 1
        counts = [0, 1, 1, 7, 64, 400] if self.steps < MOST_STEPS else [1000]
        chosen = [(sequence, int(self.random.choice(counts))) for sequence in self.sequences]
        parts = [(sequence, min(count, len(sequence.keys) - sequence.done)) for sequence, count in chosen]
        parts.sort(key=lambda part: part[1] != 1)  # decodes first
        starts, slots, positions = [0], [], []
        for sequence, count in parts:
            places = range(sequence.done, sequence.done + count)
            slots += [sequence.blocks[place // self.block_size] * self.block_size + place % self.block_size for place in places]
            positions += places
            starts.append(starts[-1] + count)
            sequence.done += count
        lengths = [sequence.done for sequence, _ in parts]
        table = torch.zeros(len(parts), max(len(sequence.blocks) for sequence, _ in parts), dtype=torch.int64)
        for row, (sequence, _) in enumerate(parts):
            table[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        decodes = sum(count == 1 for _, count in parts)
        batch = PagedBatch(tuple(starts), tuple(lengths), torch.tensor(lengths), table, torch.tensor(slots, dtype=torch.int64), decodes)
        query, key, value = (
            torch.cat([getattr(sequence, name)[sequence.done - count : sequence.done] for sequence, count in parts])
            for name in ("query", "keys", "values")
        )
        angles = (self.cosines[positions], self.sines[positions])
        query = operators.rotary_and_write_kv(query, key, value, *angles, self.cache, batch.slot_mapping)
        got = operators.paged_attention(query, self.cache, batch, self.form)
        assert got.dtype is self.dtype
        tolerance = INT8_TOLERANCE if self.int8 else TOLERANCE[self.dtype]
        for row, (sequence, count) in enumerate(parts):
            wanted = sequence.wanted[sequence.done - count : sequence.done]
            torch.testing.assert_close(got[starts[row] : starts[row + 1]].double(), wanted, atol=tolerance, rtol=tolerance)


def run(case: Case, operators) -> None:
    while not case.is_done:
        case.step(operators)
    case.step(operators)  # all are empty now


@implementations
@dtypes
@pytest.mark.parametrize("seed", CASES)
def test_attention_over_the_cache_equals_attention_written_out(operators, dtype, seed) -> None:
    run(Case(seed, dtype, (16, 32, 48), (32, 64, 96)), operators)


@pytest.mark.skipif(bool(missing(cpu)), reason="not built")
@dtypes
@pytest.mark.parametrize("seed", range(4))
def test_keys_and_values_in_eight_bits_are_within_their_rounding(dtype, seed) -> None:
    run(Case(seed, dtype, (16, 32), (32, 64), int8=True), cpu)


@dtypes
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_takes_blocks_and_heads_of_any_size(dtype, seed) -> None:
    run(Case(seed, dtype, (1, 5, 7), (2, 20, 80)), reference)


@implementations
@dtypes
def test_what_is_written_is_what_is_read_and_padding_is_not_written(operators, dtype) -> None:
    """A query that sees one token gives its value, whatever the layout inside a block."""
    cache = torch.zeros(5, 2, 16, 64, dtype=dtype)
    key, value = torch.randn(4, 2, 32).to(dtype), torch.randn(4, 2, 32).to(dtype)
    slots = torch.tensor([16, 48, 64, -1])
    operators.write_kv(key, value, cache, slots)
    assert cache.flatten(1).any(dim=1).tolist() == [False, True, False, True, True]
    ones = torch.tensor([1, 1, 1])
    batch = PagedBatch((0, 1, 2, 3), (1, 1, 1), ones, slots[:3, None] // 16, slots[:3], 3)
    got = operators.paged_attention(key[:3], cache, batch, AttentionForm(1.0))
    torch.testing.assert_close(got, value[:3], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    shorter = torch.zeros_like(cache)
    operators.write_kv(key, value, shorter, slots[:2])
    assert shorter.flatten(1).any(dim=1).tolist() == [False, True, False, True, False], "the slot mapping says how many there are"


@implementations
@dtypes
@pytest.mark.parametrize("seed", range(4))
def test_norm_rotation_and_activations_equal_arithmetic_written_out(operators, dtype, seed) -> None:
    random = np.random.default_rng(seed)
    rows, size, heads = (int(random.integers(low, high)) for low, high in ((0, 40), (2, 300), (1, 9)))
    within = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    hidden, residual, weight = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)

    def normed(wide):
        return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.double()

    torch.testing.assert_close(operators.rms_norm(hidden, weight, 1e-5).double(), normed(hidden.double()), **within)
    both = (hidden.double() + residual.double()).to(dtype)
    torch.testing.assert_close(operators.add_rms_norm(hidden, residual, weight, 1e-5).double(), normed(both.double()), **within)
    assert torch.equal(residual, both), "the residual stream has the sum, rounded once"

    half = int(random.integers(1, 70))
    states, angles = torch.randn(rows, heads, 2 * half).to(dtype), torch.randn(rows, half)
    turned = operators.rotary(states, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.double(), rotated(states, angles.cos(), angles.sin()), **within)

    both = torch.randn(rows, 2 * size).to(dtype)
    gate, up = both[:, :size].double(), both[:, size:].double()
    torch.testing.assert_close(operators.silu_and_mul(both).double(), gate * torch.sigmoid(gate) * up, **within)
    gelu = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(operators.gelu_tanh_and_mul(both).double(), gelu * up, **within)
