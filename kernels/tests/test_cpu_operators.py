"""The native operators as torch sees them: registration, strides, what they refuse, and the same numbers as plain torch."""

import pytest
import torch
from torch.nn.functional import linear
from trivet_kernels import reference
from trivet_kernels.api import AttentionForm, PagedBatch
from trivet_kernels.cpu.decoder import WeightFormat
from trivet_kernels.cpu.library import NotBuilt, native_library

try:
    native_library()
except NotBuilt as missing:
    pytest.skip(str(missing), allow_module_level=True)

from trivet_kernels.cpu import operators
from trivet_kernels.cpu.operators import PackedWeight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WEIGHT_TOLERANCE = {WeightFormat.FLOAT32: 1e-5, WeightFormat.BFLOAT16: 1e-2, WeightFormat.INT8: 2e-2}
"""Of the greatest output: activations are rounded to the weight's type."""
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
OVERLOADS = torch.ops.trivet


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transposed(values: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension apart in memory."""
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def packed(outputs: int, inputs: int, format: WeightFormat) -> PackedWeight:
    weight = PackedWeight.empty(format, outputs, inputs)
    weight.fill(random(outputs, inputs, seed=3) / inputs**0.5)
    return weight


def cache_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(4, 2, 16, 64, dtype=dtype)


def calls(dtype: torch.dtype) -> list[tuple[str, tuple[object, ...]]]:
    """Each operator with a contiguous, a strided and an empty input where it takes rows."""
    made: list[tuple[str, tuple[object, ...]]] = []
    weight, angles = packed(40, 48, WeightFormat.BFLOAT16), random(5, 16)
    for rows in (random(5, 48, dtype=dtype), transposed(random(5, 48, dtype=dtype)), random(0, 48, dtype=dtype)):
        made += [
            ("rms_norm", (rows, random(48), 1e-5)),
            ("add_rms_norm", (rows, rows.clone(), random(48), 1e-5)),
            ("silu_and_mul", (rows,)),
            ("gelu_tanh_and_mul", (rows,)),
            ("linear", (rows, weight.data, None, 40, int(weight.format))),
            ("linear", (rows, weight.data, random(40), 40, int(weight.format))),
        ]
    slots = torch.tensor([3, 17, -1, 63, 40])
    for heads in (random(5, 2, 32, dtype=dtype), transposed(random(5, 2, 32, dtype=dtype))):
        made += [
            ("rotary", (heads, angles.cos(), angles.sin())),
            ("write_kv", (heads, heads + 1, cache_of(dtype), slots)),
            ("rotary_and_write_kv", (heads, heads + 1, heads + 2, angles.cos(), angles.sin(), cache_of(dtype), slots)),
        ]
    batch = (torch.tensor([0, 1, 5, 5]), torch.tensor([3, 20, 0]), torch.tensor([[1, 0], [3, 2], [0, 0]]), 0.2)
    for cache in (cache_of(dtype), torch.zeros(4, 2, 16, 72, dtype=torch.int8)):
        made.append(("paged_attention", (transposed(random(5, 4, 32, dtype=dtype)), cache, *batch, 7, 30.0)))
    return [*made, ("packed_rows", (torch.tensor([3, 0, 39]), weight.data, 40, 48, int(weight.format)))]


@dtypes
def test_every_operator_passes_torchs_own_check(dtype: torch.dtype) -> None:
    checked = set()
    made = calls(dtype)
    for name, arguments in made if dtype is torch.float32 else dict(made).items():
        torch.library.opcheck(getattr(OVERLOADS, name).default, arguments)
        checked.add(name)
    assert checked == {
        name.removeprefix("trivet::") for name in map(str, torch._C._dispatch_get_all_op_names()) if name.startswith("trivet::")
    }


@dtypes
def test_rows_of_any_strides_give_what_plain_torch_gives(dtype: torch.dtype) -> None:
    rows = random(7, 2, 90, dtype=dtype)
    for states in (rows, transposed(rows), rows[::2], rows[:1].expand(3, 2, 90), rows[:, :1, :]):
        weight = random(90, dtype=dtype, seed=1)
        for got, wanted in (
            (operators.rms_norm(states, weight, 1e-5), reference.rms_norm(states, weight, 1e-5)),
            (operators.silu_and_mul(states), reference.silu_and_mul(states)),
            (operators.gelu_tanh_and_mul(states), reference.gelu_tanh_and_mul(states)),
        ):
            torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_the_residual_is_updated_where_it_lies(dtype: torch.dtype) -> None:
    hidden, weight = random(5, 64, dtype=dtype), random(64, seed=2)
    for residual in (random(5, 64, dtype=dtype, seed=1), random(5, 128, dtype=dtype, seed=1)[:, ::2]):
        wanted_residual = residual.clone()
        wanted = reference.add_rms_norm(hidden, wanted_residual, weight, 1e-5)
        got = operators.add_rms_norm(hidden, residual, weight, 1e-5)
        assert torch.equal(residual, wanted_residual)
        torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("size", [8, 32, 80])
def test_heads_of_any_even_size_and_strides_are_rotated(dtype: torch.dtype, size: int) -> None:
    mixed, angles = random(6, 5 * size, dtype=dtype), random(6, size // 2, seed=1)
    for states in (mixed.view(6, 5, size)[:, 1:3], mixed.view(6, 5, size)[:, :1], transposed(mixed.view(6, 5, size))):
        got = operators.rotary(states, angles.cos(), angles.sin())
        wanted = reference.rotary(states, angles.cos(), angles.sin())
        torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_rotating_and_writing_at_once_is_doing_one_after_the_other(dtype: torch.dtype) -> None:
    query, key, value = random(6, 4, 32, dtype=dtype), random(6, 2, 32, dtype=dtype, seed=1), random(9, 2, 32, dtype=dtype, seed=2)[:6]
    angles, slots = random(6, 16, seed=3), torch.tensor([0, 15, 16, -1, 63, 31])
    together, apart = cache_of(torch.float32), cache_of(torch.float32)
    rotated = operators.rotary_and_write_kv(query, key, value, angles.cos(), angles.sin(), together, slots)
    # In float32 between the two, where the operator alone would round to the dtype.
    operators.write_kv(operators.rotary(key.float(), angles.cos(), angles.sin()), value.float(), apart, slots)
    assert torch.equal(rotated, operators.rotary(query, angles.cos(), angles.sin()))
    assert torch.equal(together, apart)
    assert int((together != 0).any(dim=(1, 2, 3)).sum()) == 3, "blocks 0, 1 and 3 are written, and no other"


@dtypes
@pytest.mark.parametrize("format", list(WEIGHT_TOLERANCE))
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 70), (100, 64), (64, 257)])
def test_products_are_those_of_the_rows_that_the_packed_weight_gives_back(
    dtype: torch.dtype, format: WeightFormat, outputs: int, inputs: int
) -> None:
    weight, bias = packed(outputs, inputs, format), random(outputs, seed=5)
    plain = operators.packed_rows(torch.arange(outputs), weight)
    for hidden in (random(19, inputs, dtype=dtype), transposed(random(19, inputs, dtype=dtype)), random(2, 3, inputs, dtype=dtype)):
        got, wanted = operators.linear(hidden, weight, bias), linear(hidden.float(), plain, bias)
        assert got.dtype is dtype
        assert (got.float() - wanted).abs().max() <= (WEIGHT_TOLERANCE[format] + TOLERANCE[dtype] / 2) * wanted.abs().max()


@dtypes
@pytest.mark.parametrize("format", list(WEIGHT_TOLERANCE))
def test_a_row_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(dtype: torch.dtype, format: WeightFormat) -> None:
    weight, hidden = packed(300, 512, format), random(70, 512, dtype=dtype)
    together = operators.linear(hidden, weight)
    normed = operators.rms_norm(hidden, random(512), 1e-5)
    try:
        for threads in (1, 3):
            operators.use_threads(threads)
            assert torch.equal(torch.cat([operators.linear(row, weight) for row in hidden.split(1)]), together)
            assert torch.equal(torch.cat([operators.rms_norm(row, random(512), 1e-5) for row in hidden.split(1)]), normed)
    finally:
        operators.use_threads(torch.get_num_threads())


def test_what_does_not_fit_is_refused_with_its_sizes() -> None:
    weight, heads, cache = packed(40, 48, WeightFormat.FLOAT32), random(3, 2, 32), cache_of()
    with pytest.raises(TypeError, match=r"no torch\.float64"):
        operators.silu_and_mul(random(2, 8).double())
    with pytest.raises(ValueError, match=r"a weight \[8\] for rows of 9"):
        operators.rms_norm(random(2, 9), random(8), 1e-5)
    with pytest.raises(ValueError, match="expanded"):
        operators.add_rms_norm(random(3, 8), random(1, 8).expand(3, 8), random(8), 1e-5)
    with pytest.raises(ValueError, match=r"rows of 47 for a weight \[40, 48\]"):
        operators.linear(random(2, 47), weight)
    with pytest.raises(ValueError, match=r"no packed weight \[40, 47\] in Q4_0"):
        PackedWeight.empty(WeightFormat.Q4_0, 40, 47)
    with pytest.raises(IndexError, match="row 40 of 40"):
        operators.packed_rows(torch.tensor([40]), weight)
    with pytest.raises(IndexError, match="slot 64 is outside a cache of 4 blocks of 16 tokens"):
        operators.write_kv(heads, heads, cache, torch.tensor([0, 64, 1]))
    assert not cache.any(), "nothing is written of what is refused"
    with pytest.raises(ValueError, match="keys"):
        operators.write_kv(heads, heads, cache, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="a cache is contiguous"):
        operators.write_kv(heads, heads, cache.transpose(0, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"no torch\.float16"):
        operators.write_kv(heads, heads, cache.half(), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("starts", "lengths", "table"),
    [
        ([0, 2], [3], [[1]]),  # a token is nobody's
        ([0, 3], [2], [[1]]),  # fewer cached than asked of
        ([0, 3], [17], [[1]]),  # more cached than the table has room for
        ([0, 3], [3], [[4]]),  # a block that the cache has not
        ([0, 3], [3], [[-1]]),
        ([0, 3, 3], [3, 20], [[1, 0], [2, 4]]),
    ],
)
def test_attention_reads_nothing_outside_its_cache(starts: list[int], lengths: list[int], table: list[list[int]]) -> None:
    batch = PagedBatch(tuple(starts), tuple(lengths), torch.tensor(lengths), torch.tensor(table), torch.zeros(3, dtype=torch.int64), 0)
    with pytest.raises(IndexError, match=f"sequence {len(lengths) - 1}"):
        operators.paged_attention(random(3, 2, 32), cache_of(), batch, AttentionForm(1.0))
