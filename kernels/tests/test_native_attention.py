"""Native paged attention against attention written out in float64, over random batches; and against its own bits."""

import copy
import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from trivet_kernels.cpu.attention_signatures import AttentionCall, CacheType
from trivet_kernels.cpu.library import NotBuilt, instruction_set, native_library, use_instruction_set
from trivet_kernels.cpu.operator_signatures import Cache, Heads

try:
    native_library()
except NotBuilt as reason:
    pytest.skip(str(reason), allow_module_level=True)

INSTRUCTION_SETS = ("plain", "avx2", "avx512", "amx")
TOLERANCE = {CacheType.FLOAT32: 1e-5, CacheType.BFLOAT16: 1.5e-2, CacheType.INT8_FLOAT32: 1e-5, CacheType.INT8_BFLOAT16: 1.5e-2}
"""Of the greatest value; int8 is held to attention over the values that it keeps."""
INT8_STEP = 1 / 250
"""What int8 changes at most, of a token's greatest number; half a step of 127."""


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = instruction_set()
    if not use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    use_instruction_set(before)
    native_library().trivet_operators_use_threads(1)


@dataclass(frozen=True)
class Case:
    """Sequences as (query tokens, length); the first `prefix` tokens of those from `sharing` on lie in the same blocks."""

    type: CacheType
    heads: int
    kv_heads: int
    size: int
    block_size: int
    spans: tuple[tuple[int, int], ...]
    window: int = 0
    soft_cap: float = 0.0
    prefix: int = 0
    sharing: int = 0
    seed: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.type in (CacheType.BFLOAT16, CacheType.INT8_BFLOAT16) else torch.float32

    @property
    def is_int8(self) -> bool:
        return self.type in (CacheType.INT8_FLOAT32, CacheType.INT8_BFLOAT16)


class Built:
    """A case's tensors and its cache, written by the native code."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)

        def random_states(count: int, heads: int) -> torch.Tensor:
            spread = torch.rand(count, heads, 1, generator=generator) * 2
            return (torch.randn(count, heads, case.size, generator=generator) * spread).to(case.dtype)

        lengths = [length for _, length in case.spans]
        needed = [-(-length // case.block_size) for length in lengths]
        shared = case.prefix // case.block_size
        order = torch.randperm(sum(needed) + shared, generator=generator).add(1).tolist()
        common = [order.pop() for _ in range(shared)]
        self.table = np.zeros((len(lengths), max([1, *needed])), dtype=np.int32)
        for row, blocks in enumerate(needed):
            own = [order.pop() for _ in range(blocks)]
            if row >= case.sharing:
                own = common[:blocks] + own[shared:]
            self.table[row, :blocks] = own
        blocks = sum(needed) + shared + 1
        per_token = 2 * case.size + 8 if case.is_int8 else 2 * case.size * case.dtype.itemsize
        size = blocks * case.kv_heads * case.block_size * per_token
        self.memory = torch.zeros(size + 64, dtype=torch.uint8)
        self.cache = self.memory[-self.memory.data_ptr() % 64 :]
        self.keys = random_states(blocks * case.block_size, case.kv_heads)
        self.values = random_states(blocks * case.block_size, case.kv_heads)
        slots = torch.arange(len(self.keys))

        def head(states: torch.Tensor) -> Heads:
            return Heads(states.data_ptr(), states.stride(0), states.stride(1), case.kv_heads)

        outside = native_library().trivet_rotate_and_write(
            int(case.dtype == torch.bfloat16),
            len(self.keys),
            case.size,
            None,
            None,
            None,
            ctypes.byref(head(self.keys)),
            ctypes.byref(head(self.values)),
            ctypes.byref(Cache(self.cache.data_ptr(), case.type, blocks, case.block_size, case.kv_heads, slots.data_ptr())),
        )
        assert outside == -1
        self.starts = np.cumsum([0, *(count for count, _ in case.spans)]).astype(np.int64)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.query = random_states(int(self.starts[-1]), case.heads)

    def run(self, *, threads: int = 1, shares: bool = True) -> tuple[torch.Tensor, int]:
        """Outputs, and how many chunks were read for several sequences at once."""
        case, library = self.case, native_library()
        library.trivet_operators_use_threads(threads)
        output = torch.full((len(self.query), case.heads, case.size), 7.0)
        call = AttentionCall(
            query=self.query.data_ptr(),
            query_stride=case.heads * case.size,
            output=output.data_ptr(),
            cache=self.cache.data_ptr(),
            block_table=self.table.ctypes.data,
            table_stride=self.table.shape[1],
            query_starts=self.starts.ctypes.data,
            lengths=self.lengths.ctypes.data,
            sequences=len(case.spans),
            block_size=case.block_size,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_size=case.size,
            window=case.window,
            cache_type=case.type,
            is_output_bfloat16=0,
            shares_prefixes=int(shares),
            scale=case.size**-0.5,
            soft_cap=case.soft_cap,
        )
        return output, library.trivet_paged_attention(ctypes.byref(call))

    def kept(self, states: torch.Tensor) -> torch.Tensor:
        """What the cache keeps of keys or values, in float64."""
        if not self.case.is_int8:
            return states.double()
        scale = states.float().abs().amax(dim=-1, keepdim=True)
        # Not 127 / scale: torch multiplies by the reciprocal for that.
        cells = torch.round(states.float() * torch.where(scale > 0, torch.full_like(scale, 127) / scale, 0))
        return cells.double() * (scale / 127).double()

    def expected(self) -> torch.Tensor:
        case = self.case
        out = torch.zeros(len(self.query), case.heads, case.size, dtype=torch.float64)
        keys, values = self.kept(self.keys), self.kept(self.values)
        for row, (count, length) in enumerate(case.spans):
            if count == 0 or length == 0:
                continue
            places = torch.from_numpy(self.table[row, np.arange(length) // case.block_size].astype(np.int64)) * case.block_size
            places = places + torch.arange(length) % case.block_size
            group = case.heads // case.kv_heads
            key, value = (states[places].repeat_interleave(group, dim=1) for states in (keys, values))
            query = self.query[self.starts[row] : self.starts[row + 1]].double()
            scores = torch.einsum("qhd,khd->hqk", query, key) * case.size**-0.5
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            at, own = torch.arange(length)[None, :], torch.arange(length - count, length)[:, None]
            seen = at <= own
            if case.window:
                seen &= at > own - case.window
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
            out[self.starts[row] : self.starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, value)
        return out


@cache
def expected_of(case: Case) -> torch.Tensor:
    """Attention written out, once for all instruction sets; a case gives the same tensors each time it is built."""
    return Built(case).expected()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def random_case(type: CacheType, seed: int) -> Case:
    pick = random.Random(f"{type} {seed}")
    kv_heads, group = pick.choice([1, 2, 3]), pick.choice([1, 2, 3, 4, 7, 8])
    ends = [1, 2, 15, 16, 17, 63, 255, 256, 257, 300, 511, 512, 513, 700]
    spans = []
    for _ in range(pick.randint(1, 4)):
        length = pick.choice(ends)
        spans.append((pick.choice([1, 1, min(length, pick.choice([2, 7, 33, 130])), length]), length))
    if pick.random() < 0.3:
        spans.insert(pick.randint(0, len(spans)), pick.choice([(0, 40), (2, 0), (0, 0)]))
    return Case(
        type,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=pick.choice([32, 64, 96, 128, 256]),
        block_size=pick.choice([16, 32, 48, 64]),
        spans=tuple(spans),
        window=pick.choice([0, 0, 0, 1, 5, 16, 100, 256, 300, 1000]),
        soft_cap=pick.choice([0.0, 0.0, 0.0, 2.0, 50.0]),
        seed=seed,
    )


@pytest.mark.parametrize("type", list(CacheType), ids=lambda type: type.name)
def test_random_batches_agree_with_attention_written_out_whatever_the_threads(type: CacheType, isa: str) -> None:
    for seed in range(3 if isa == "plain" else 5):
        case = random_case(type, seed)
        built = Built(case)
        expected, (got, _) = expected_of(case), built.run(threads=1)
        bound = TOLERANCE[type] * float(built.values.abs().max() if built.values.numel() else 1)
        assert float((got - expected).abs().max() if got.numel() else 0) <= bound, case
        for threads in (2, 3):
            assert same_bits(built.run(threads=threads)[0], got), (case, threads)


@pytest.mark.parametrize("type", list(CacheType), ids=lambda type: type.name)
def test_a_query_has_the_same_bits_prefilled_in_chunks_and_alone(type: CacheType, isa: str) -> None:
    for window in (0, 70):
        whole = Case(type, heads=6, kv_heads=2, size=64, block_size=16, spans=((600, 600),), window=window)
        built = Built(whole)
        together, _ = built.run(threads=2)
        for first, end in ((0, 1), (0, 40), (255, 257), (300, 301), (256, 513), (599, 600)):
            part = copy.copy(built)  # other queries of the same cache
            part.case = replace(whole, spans=((end - first, end),))
            part.query = built.query[first:end].contiguous()
            part.starts, part.lengths = np.array([0, end - first]), np.array([end])
            assert same_bits(part.run(threads=3)[0], together[first:end]), (window, first, end)


@pytest.mark.parametrize("type", list(CacheType), ids=lambda type: type.name)
def test_a_prefix_in_common_is_read_once_and_changes_no_bit(type: CacheType, isa: str) -> None:
    spans = ((1, 400), (1, 560), (1, 560), (1, 560), (2, 547), (1, 1500), *((1, 800 + 3 * row) for row in range(8)))
    case = Case(type, heads=6, kv_heads=2, size=64, block_size=32, spans=spans, prefix=544, sharing=1)
    built = Built(case)
    alone, saved_alone = built.run(threads=1, shares=False)
    together, saved = built.run(threads=2)
    assert saved_alone == 0
    assert saved == 2 * (len(spans) - 2)  # all but the first share both whole chunks of the prefix
    assert same_bits(alone, together)
    assert (together - expected_of(case)).abs().max() <= TOLERANCE[type] * float(built.values.abs().max())


def test_a_short_prefix_few_sequences_and_a_window_are_not_worth_sharing() -> None:
    many = Case(CacheType.FLOAT32, heads=2, kv_heads=1, size=32, block_size=16, spans=((1, 300),) * 8, prefix=256)
    assert Built(many).run()[1] == 7
    for other in (replace(many, prefix=240), replace(many, spans=many.spans[:7]), replace(many, window=280)):
        assert Built(other).run()[1] == 0


def test_groups_part_where_their_blocks_do() -> None:
    case = Case(CacheType.FLOAT32, heads=2, kv_heads=1, size=32, block_size=16, spans=((1, 1100),) * 20, prefix=1024)
    built = Built(case)
    for rows, seed in ((slice(0, 9), 2), (slice(9, 16), 3)):  # nine go on together; seven, and the last four, are too few
        built.table[rows, 16:] = Built(replace(case, seed=seed)).table[rows, 16:]
    alone, _ = built.run(shares=False)
    together, saved = built.run(threads=2)
    assert saved == 19 + 3 * 8
    assert same_bits(alone, together)


@pytest.mark.parametrize("type", [CacheType.INT8_FLOAT32, CacheType.INT8_BFLOAT16], ids=lambda type: type.name)
def test_int8_keeps_half_a_step_of_a_tokens_greatest_number(type: CacheType) -> None:
    built = Built(Case(type, heads=1, kv_heads=1, size=64, block_size=16, spans=((1, 1),) * 3))
    got, _ = built.run()
    rounded = 2**-8 if type == CacheType.INT8_BFLOAT16 else 0.0
    for row in range(3):  # one token each: the output is its value
        value = built.values[int(built.table[row, 0]) * 16, 0].float()
        assert (got[row, 0] - value).abs().max() <= (INT8_STEP + rounded) * value.abs().max()
