"""Paged attention over a cache in the native layout: prompts, chunks and decodes alike, grouped heads, windows, soft caps.

Products are in the type of the cache; those of an int8 cache in the type of the query, which has to be that of the keys when they were
written.
"""

import ctypes

import torch

from trivet_kernels.api import AttentionForm, PagedBatch
from trivet_kernels.cpu.attention_signatures import AttentionCall
from trivet_kernels.cpu.operators.kv_cache import check_cache, type_of_cache
from trivet_kernels.cpu.operators.memory import TYPES, type_of
from trivet_kernels.cpu.operators.registration import register
from trivet_kernels.cpu.operators.threads import operator_library


def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, form: AttentionForm) -> torch.Tensor:
    """Query `[T, H, D]` over the cached keys and values of each sequence; gives `[T, H, D]` in the dtype of the query."""
    starts, lengths = torch.tensor(batch.query_starts), batch.seq_lens_tensor
    attended: torch.Tensor = _ATTENTION(
        query, cache, starts, lengths, batch.block_table, form.scale, form.window or 0, form.soft_cap or 0.0
    )
    return attended


def _paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    size = check_cache(cache)
    blocks, kv_heads, block_size, _ = cache.shape
    tokens, heads, _ = query.shape
    if query.shape[2] != size or heads % kv_heads:
        raise ValueError(f"queries {list(query.shape)} for a cache {list(cache.shape)}")
    output = torch.empty(query.shape, dtype=query.dtype)
    number, cache_number = type_of(query), type_of_cache(cache, query)
    products = query.dtype if cache.dtype is torch.int8 else cache.dtype
    states = query.to(products)
    if states.stride(2) != 1 or (states.stride(1) != size and heads > 1):
        states = states.contiguous()
    table, starts, lengths = (
        block_table.to(torch.int32).contiguous(),
        query_starts.to(torch.int64).contiguous(),
        seq_lens.to(torch.int64).contiguous(),
    )
    call = AttentionCall(
        query=states.data_ptr(),
        query_stride=states.stride(0) if tokens > 1 else heads * size,
        output=output.data_ptr(),
        cache=cache.data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.shape[1],
        query_starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        sequences=len(lengths),
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        window=window,
        cache_type=cache_number,
        is_output_bfloat16=int(number == TYPES[torch.bfloat16]),
        shares_prefixes=1,
        scale=scale,
        soft_cap=soft_cap,
    )
    if table.dim() != 2 or len(table) != len(lengths) or starts.shape != (len(lengths) + 1,):
        raise ValueError(f"{list(starts.shape)} starts, {list(lengths.shape)} lengths and a block table {list(table.shape)}")
    library = operator_library()
    wrong = library.trivet_attention_fault(
        starts.data_ptr(), lengths.data_ptr(), len(lengths), tokens, table.data_ptr(), table.shape[1], block_size, blocks
    )
    if wrong >= 0:
        raise IndexError(
            f"sequence {wrong} of those that start at {starts.tolist()} of {tokens} tokens, with {lengths.tolist()} cached, does not fit "
            f"a block table of {table.shape[1]} columns and a cache of {blocks} blocks"
        )
    library.trivet_paged_attention(ctypes.byref(call))
    return output


def _fake(
    query: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape)


_ATTENTION = register(
    "paged_attention(Tensor query, Tensor cache, Tensor query_starts, Tensor seq_lens, Tensor block_table, float scale, int window, "
    "float soft_cap) -> Tensor",
    _paged_attention,
    _fake,
)
