"""Every implementation of the operators against arithmetic written out in float64."""

import math

import pytest
import torch
from trivet_kernels import reference
from trivet_kernels.api import PagedBatch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

implementations = pytest.mark.parametrize("operators", [reference], ids=lambda ops: ops.name)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def plain_attention(query, keys, values, scale):
    """One sequence, float64: query [q, H, D] are the last of keys [n, K, D]."""
    count, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(heads):
        k, v = keys[:, head // (heads // kv_heads)].double(), values[:, head // (heads // kv_heads)].double()
        scores = query[:, head].double() @ k.T * scale
        positions = torch.arange(length - count, length)
        scores[torch.arange(length)[None, :] > positions[:, None]] = -math.inf
        out[:, head] = torch.softmax(scores, dim=-1) @ v
    return out


@implementations
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("spans", [[(1, 1)], [(1, 17), (1, 3), (1, 64)], [(5, 5)], [(1, 9), (7, 23), (16, 16), (2, 33)]])
def test_paged_attention_equals_attention_written_out(operators, dtype, heads, kv_heads, block_size, spans) -> None:
    generator = torch.Generator().manual_seed(1)
    size = 32
    num_blocks = 1 + sum(-(-length // block_size) for _, length in spans)
    cache = torch.randn(num_blocks, kv_heads, block_size, 2 * size, generator=generator).to(dtype)
    free = torch.randperm(num_blocks - 1, generator=generator).add(1).tolist()
    table = torch.zeros(len(spans), max(-(-length // block_size) for _, length in spans), dtype=torch.int64)
    starts, slots, keys, values = [0], [], [], []
    for row, (count, length) in enumerate(spans):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        table[row, : len(blocks)] = torch.tensor(blocks)
        places = [blocks[position // block_size] * block_size + position % block_size for position in range(length)]
        slots += places[length - count :]
        starts.append(starts[-1] + count)
        content = cache.permute(0, 2, 1, 3).reshape(-1, kv_heads, 2 * size)[places]
        keys.append(content[..., :size])
        values.append(content[..., size:])
    query = torch.randn(starts[-1], heads, size, generator=generator).to(dtype)
    lengths = [length for _, length in spans]
    batch = PagedBatch(
        tuple(starts), tuple(lengths), torch.tensor(lengths), table, torch.tensor(slots), sum(count == 1 for count, _ in spans)
    )
    got = operators.paged_attention(query, cache, batch, size**-0.5)
    for row in range(len(spans)):
        part = slice(starts[row], starts[row + 1])
        wanted = plain_attention(query[part], keys[row], values[row], size**-0.5)
        torch.testing.assert_close(got[part].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@implementations
@dtypes
def test_what_is_written_is_where_the_slots_say_and_padding_is_not_written(operators, dtype) -> None:
    cache = torch.zeros(5, 2, 4, 16, dtype=dtype)
    key, value = torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    slots = torch.tensor([4, 7, 19, -1])
    operators.write_kv(key, value, cache, slots)
    flat = cache.permute(0, 2, 1, 3).reshape(-1, 2, 16)
    for row, slot in enumerate(slots[:3].tolist()):
        assert torch.equal(flat[slot], torch.cat([key[row], value[row]], dim=-1))
    assert int((flat.abs().sum(dim=(1, 2)) != 0).sum()) == 3


@implementations
@dtypes
def test_norm_rotation_and_activation_equal_arithmetic_written_out(operators, dtype) -> None:
    hidden, weight = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype)
    wide = hidden.double()
    wanted = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(operators.rms_norm(hidden, weight, 1e-5).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    states, angles = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 4)
    turned = operators.rotary(states, angles.cos(), angles.sin())
    complex_states = torch.complex(states[..., :4].double(), states[..., 4:].double())
    wanted = complex_states * torch.polar(torch.ones(3, 1, 4, dtype=torch.float64), angles.double()[:, None])
    got = torch.complex(turned[..., :4].double(), turned[..., 4:].double())
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    both = torch.randn(3, 32).to(dtype)
    gate, up = both[:, :16].double(), both[:, 16:].double()
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(operators.silu_and_mul(both).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
