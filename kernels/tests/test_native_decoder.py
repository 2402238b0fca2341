"""The native decoder against a plain one written here in torch: every format, head layout and way that tokens can come."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, silu
from trivet_kernels import reference
from trivet_kernels.cpu.decoder import HEAD, INT8_SCALES, DecoderShape, NativeDecoder, Part, StepArrays, WeightFormat
from trivet_kernels.cpu.library import NotBuilt, instruction_set, native_library, use_instruction_set

try:
    native_library()
except NotBuilt as reason:
    pytest.skip(str(reason), allow_module_level=True)

INSTRUCTION_SETS = ("plain", "avx2", "avx512", "amx")
VOCABULARY, LENGTH, MOST = 100, 200, 64
FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of the greatest logit; bfloat16 rounds the inputs of every product."""
SHAPES = [(3, 1, 32, 16), (4, 4, 64, 48), (6, 2, 64, 16), (9, 3, 64, 16), (9, 3, 64, 48), (8, 2, 128, 16)]
"""Query heads, key and value heads, their size, and tokens of a block; blocks of any size are attention's own tests' concern."""


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = instruction_set()
    if not use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    use_instruction_set(before)


@dataclass
class Plain:
    """Pre-norm, rotary, gated: what the native decoder computes, in float32 over weights rounded to `dtype`."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    bias: bool
    tied: bool
    hidden: int = 96
    inner: int = 64
    windows: tuple[int, ...] = (0, 0)
    layers: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.heads * 100 + self.size)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(self.dtype).float()

        query, kv = self.heads * self.size, self.kv_heads * self.size
        self.embedding = weight(VOCABULARY, self.hidden) * 4
        self.head = self.embedding if self.tied else weight(VOCABULARY, self.hidden) * 4
        self.final = 1 + 0.1 * weight(1, self.hidden)[0]
        for _ in range(2):
            self.layers.append(
                {
                    "norm": 1 + 0.1 * weight(1, self.hidden)[0],
                    "qkv": weight(query + 2 * kv, self.hidden),
                    "output": weight(self.hidden, query),
                    "mlp_norm": 1 + 0.1 * weight(1, self.hidden)[0],
                    "gate_and_up": weight(2 * self.inner, self.hidden),
                    "down": weight(self.hidden, self.inner),
                    "qkv_bias": weight(1, query + 2 * kv)[0],
                    "down_bias": weight(1, self.hidden)[0],
                }
            )
        positions = torch.arange(LENGTH)[:, None] / 1000 ** (torch.arange(0, self.size, 2) / self.size)
        self.angles = positions.cos(), positions.sin()

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, count = self.embedding[ids], len(ids)
        cosines, sines = (table[:count] for table in self.angles)
        own, other = torch.arange(count)[:, None], torch.arange(count)[None, :]
        for layer, window in zip(self.layers, self.windows, strict=True):
            seen = (other <= own) & (other > own - (window or count))
            normed = reference.rms_norm(hidden, layer["norm"], 1e-5)
            mixed = linear(normed, layer["qkv"], layer["qkv_bias"] if self.bias else None).view(count, -1, self.size)
            query, key, value = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            query, key = (reference.rotary(states, cosines, sines).transpose(0, 1) for states in (query, key))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[None], key[None], value.transpose(0, 1)[None], attn_mask=seen, enable_gqa=True
            )
            hidden = hidden + linear(attended[0].transpose(0, 1).reshape(count, -1), layer["output"])
            gate, up = linear(reference.rms_norm(hidden, layer["mlp_norm"], 1e-5), layer["gate_and_up"]).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer["down"], layer["down_bias"] if self.bias else None)
        return linear(reference.rms_norm(hidden, self.final, 1e-5), self.head)

    def native(self, threads: int, format: WeightFormat | None = None, kv_dtype: torch.dtype | None = None) -> NativeDecoder:
        kept = FORMATS[self.dtype] if format is None else format
        decoder = NativeDecoder(
            DecoderShape(
                layers=2,
                hidden=self.hidden,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_size=self.size,
                inner=self.inner,
                vocab=VOCABULARY,
                epsilon=1e-5,
                most_tokens=4 * LENGTH,
                threads=threads,
                cache=self.dtype,
                format=kept,
                head_format=kept,
                kv_dtype=kv_dtype,
                windows=self.windows,
            )
        )
        for index, layer in enumerate(self.layers):
            decoder.norm(index, Part.ATTENTION_NORM).copy_(layer["norm"])
            decoder.norm(index, Part.MLP_NORM).copy_(layer["mlp_norm"])
            for part, name in ((Part.QKV, "qkv"), (Part.OUTPUT, "output"), (Part.GATE_AND_UP, "gate_and_up"), (Part.DOWN, "down")):
                half = len(layer[name]) // 2  # in two pieces, as merged projections come
                decoder.fill(index, part, layer[name][:half])
                decoder.fill(index, part, layer[name][half:].to(self.dtype), half)
            if self.bias:
                decoder.bias(index, Part.QKV, len(layer["qkv_bias"])).copy_(layer["qkv_bias"])
                decoder.bias(index, Part.DOWN, self.hidden).copy_(layer["down_bias"])
        decoder.norm(HEAD).copy_(self.final)
        decoder.fill(HEAD, Part.DOWN, self.head)
        if not self.tied:
            decoder.embedding().copy_(self.embedding)
        return decoder


class Served:
    """Sequences with block tables of their own over one cache, run in whatever steps a test likes."""

    def __init__(
        self,
        plain: Plain,
        *,
        block_size: int = 16,
        threads: int = 2,
        format: WeightFormat | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.plain, self.block_size = plain, block_size
        self.decoder = plain.native(threads, format, kv_dtype)
        per_sequence = -(-LENGTH // block_size)
        order = np.random.default_rng(3).permutation(4 * per_sequence) + 1
        self.tables = order.reshape(4, per_sequence).astype(np.int32)
        kept, scales = (plain.dtype, 0) if kv_dtype is None else (kv_dtype, INT8_SCALES)
        size = (4 * per_sequence + 1) * plain.kv_heads * block_size * (2 * plain.size + scales)
        self.caches = [torch.full((size,), 7, dtype=kept) for _ in range(2)]  # what was there before must not be seen

    def step(self, *parts: tuple[int, torch.Tensor, int]) -> list[torch.Tensor]:
        """Each part: a sequence, its tokens, the position of the first; gives the logits of every token of every part."""
        positions = np.concatenate([np.arange(first, first + len(ids)) for _, ids, first in parts]).astype(np.int64)
        tables = np.stack([self.tables[sequence] for sequence, _, _ in parts])
        counts = [len(ids) for _, ids, _ in parts]
        rows = np.repeat(np.arange(len(parts)), counts)
        slots = tables[rows, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        arrays = StepArrays(
            token_ids=np.concatenate([ids.numpy() for _, ids, _ in parts]).astype(np.int64),
            positions=positions,
            slots=slots,
            query_starts=np.array([0, *itertools.accumulate(counts)], dtype=np.int64),
            block_table=np.ascontiguousarray(tables),
            sampled_rows=np.arange(len(positions), dtype=np.int64),
        )
        return list(self.decoder.run(arrays, self.caches, self.block_size, self.plain.angles).split(counts))


def ids_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block_size"), SHAPES)
def test_logits_are_those_of_the_plain_decoder(heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype, isa: str) -> None:
    plain = Plain(heads, kv_heads, size, dtype, bias=size == 64, tied=heads != kv_heads)
    ids = ids_of(1, 70)
    expected = plain.logits(ids)
    (got,) = Served(plain, block_size=block_size).step((2, ids, 0))
    assert (got - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_position_has_the_same_bits_alone_in_a_batch_in_chunks_and_decoded(dtype: torch.dtype, threads: int, isa: str) -> None:
    plain = Plain(6, 2, 64, dtype, bias=True, tied=True)
    ids, others = ids_of(1, 90), [ids_of(2, 40), ids_of(3, 1), ids_of(4, 33)]
    (alone,) = Served(plain, threads=1).step((0, ids, 0))
    in_batch = Served(plain, threads=threads).step((1, others[0], 0), (0, ids, 0), (2, others[1], 0), (3, others[2], 0))
    assert same_bits(in_batch[1], alone)
    chunked = Served(plain, threads=threads)
    pieces = [chunked.step((3, others[2][:7], 0), (0, ids[begin:end], begin))[1] for begin, end in ((0, 17), (17, 18), (18, 64), (64, 90))]
    assert same_bits(torch.cat(pieces), alone)
    decoded = Served(plain, threads=threads)
    assert same_bits(torch.cat([decoded.step((0, ids[at : at + 1], at))[0] for at in range(len(ids))]), alone)


@pytest.mark.parametrize(("format", "tolerance"), [(WeightFormat.INT8, 0.1), (WeightFormat.Q8_MINIMUM, 0.02)], ids=str)
def test_int8_weights_keep_close_and_keep_their_bits(format: WeightFormat, tolerance: float, isa: str) -> None:
    plain = Plain(6, 2, 64, torch.bfloat16, bias=False, tied=True)
    ids = ids_of(1, 60)
    served = Served(plain, format=format)
    (got,) = served.step((0, ids, 0))
    expected = plain.logits(ids)
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
    one_by_one = Served(plain, format=format)
    assert same_bits(torch.cat([one_by_one.step((0, ids[at : at + 1], at))[0] for at in range(len(ids))]), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_int8_cache_keeps_close_and_keeps_its_bits(dtype: torch.dtype, isa: str) -> None:
    plain = Plain(6, 2, 64, dtype, bias=False, tied=True)
    ids = ids_of(1, 60)
    (got,) = Served(plain, kv_dtype=torch.int8).step((0, ids, 0))
    expected = plain.logits(ids)
    assert 0 < (got - expected).abs().max() <= 0.1 * expected.abs().max()
    one_by_one = Served(plain, kv_dtype=torch.int8)
    assert same_bits(torch.cat([one_by_one.step((0, ids[at : at + 1], at))[0] for at in range(len(ids))]), got)


def test_every_layer_has_a_window_of_its_own(isa: str) -> None:
    plain = Plain(6, 2, 64, torch.float32, bias=False, tied=True, windows=(7, 0))
    ids = ids_of(1, 60)
    expected = plain.logits(ids)
    served = Served(plain)
    got = torch.cat([served.step((0, ids[begin : begin + 30], begin))[0] for begin in (0, 30)])
    assert (got - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()


def test_a_prefix_in_common_is_read_once_and_changes_no_bit() -> None:
    plain = Plain(6, 2, 64, torch.float32, bias=False, tied=True)
    plain.angles = (torch.rand(300, 32), torch.rand(300, 32))
    served = Served(plain)
    served.tables = np.arange(1, 17, dtype=np.int32)[None].repeat(9, axis=0)
    served.tables = np.concatenate([served.tables, np.arange(17, 26, dtype=np.int32)[:, None]], axis=1)
    served.step((0, ids_of(1, 256), 0))
    parts = [(row, ids_of(row, 1), 256) for row in range(9)]
    together = served.step(*parts)
    assert served.decoder.chunks_saved() == 8
    served.decoder.shares_prefixes = False
    alone = served.step(*parts)
    assert served.decoder.chunks_saved() == 0
    assert all(same_bits(one, other) for one, other in zip(together, alone, strict=True))


def test_a_sequence_that_is_longer_than_a_chunk_of_the_softmax_is_right() -> None:
    plain = Plain(3, 1, 32, torch.float32, bias=False, tied=True)
    served = Served(plain)
    served.tables = np.arange(1, 49, dtype=np.int32)[None].repeat(4, axis=0)
    served.caches = [torch.full((49 * 16 * 2 * 32,), 7.0) for _ in range(2)]
    positions = torch.arange(700)[:, None] / 1000 ** (torch.arange(0, 32, 2) / 32)
    plain.angles = positions.cos(), positions.sin()
    ids = ids_of(5, 700)
    expected = plain.logits(ids)
    got = torch.cat([served.step((0, ids[begin : begin + 350], begin))[0] for begin in (0, 350)])
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_states_handed_out_give_the_same_logits() -> None:
    plain = Plain(4, 4, 64, torch.float32, bias=False, tied=False)
    served = Served(plain)
    (logits,) = served.step((0, ids_of(1, 20), 0))
    hidden = torch.empty((20, plain.hidden))
    arrays = StepArrays(
        token_ids=ids_of(1, 20).numpy(),
        positions=np.arange(20),
        slots=served.tables[0, np.arange(20) // 16].astype(np.int64) * 16 + np.arange(20) % 16,
        query_starts=np.array([0, 20]),
        block_table=served.tables[:1],
        sampled_rows=np.zeros(0, dtype=np.int64),
    )
    served.decoder.run(arrays, served.caches, 16, plain.angles, hidden)
    assert same_bits(served.decoder.logits(hidden), logits)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 40}, "heads of 40"),
        ({"inner": 100}, "inner size of 100"),
        ({"heads": 7}, "7 query heads"),
        ({"cache": torch.float16}, "KV cache"),
    ],
)
def test_what_the_decoder_cannot_run_has_a_reason(change: dict[str, object], reason: str) -> None:
    shape = Plain(6, 2, 64, torch.float32, bias=False, tied=True).native(1).shape
    fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__} | change
    assert reason in (DecoderShape(**fields).reason_against() or "")
