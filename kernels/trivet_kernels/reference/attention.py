"""Paged attention on gathered keys and values.

Decodes run as one padded batch; each longer query runs alone. Query heads that share a key/value head stand where query positions do, so
grouped heads need no copy of the cache.
"""

from bisect import bisect_left

import torch
from torch.nn.functional import scaled_dot_product_attention

from trivet_kernels.api import AttentionForm, PagedBatch

# Gathered keys and values of one padded decode batch, in elements: bounds memory when lengths differ much.
MOST_GATHERED = 64 * 1024 * 1024


def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, form: AttentionForm) -> torch.Tensor:
    output = torch.empty(query.shape, dtype=query.dtype)
    _decodes(query, cache, batch, form, output)
    for index in range(batch.num_decodes, len(batch.seq_lens)):
        first, last = batch.query_starts[index], batch.query_starts[index + 1]
        if first == last:
            continue
        output[first:last] = _prefill(query[first:last], cache, batch.block_table[index], batch.seq_lens[index], form)
    return output


def _decodes(query: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, form: AttentionForm, output: torch.Tensor) -> None:
    """Sequences of one query token each, the longest with the longest so that little is padded."""
    _, kv_heads, block_size, content = cache.shape
    heads, size = query.shape[1:]
    order = sorted(range(batch.num_decodes), key=batch.seq_lens.__getitem__)
    while order:
        blocks = -(-batch.seq_lens[order[-1]] // block_size)
        fitting = max(1, MOST_GATHERED // (blocks * block_size * kv_heads * content))
        # A sequence of less than half the longest waits for a group of its own: padding never outweighs content.
        shortest = bisect_left(order, batch.seq_lens[order[-1]] / 2, key=batch.seq_lens.__getitem__)
        cut = max(shortest, len(order) - fitting)
        order, rows = order[:cut], torch.tensor(order[cut:])
        gathered = _gather(cache, batch.block_table[rows, :blocks])
        keys, values = gathered[..., :size], gathered[..., size:]
        # Without batch-dependent splits: a softmax over one row's own keys, padding at minus infinity.
        grouped = query[rows].view(len(rows), kv_heads, heads // kv_heads, size)
        scores = _capped(torch.matmul(grouped, keys.transpose(-1, -2)).float() * form.scale, form)
        positions = torch.arange(blocks * block_size)
        lengths = batch.seq_lens_tensor[rows, None]
        hidden = positions >= lengths
        if form.window is not None:
            hidden |= positions < lengths - form.window
        scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(query.dtype)
        output[rows] = torch.matmul(weights, values).reshape(len(rows), heads, size)


def _prefill(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int, form: AttentionForm) -> torch.Tensor:
    """One sequence of several query tokens, the last `len(query)` of its `length`."""
    block_size, kv_heads = cache.shape[2], cache.shape[1]
    count, heads, size = query.shape
    blocks = -(-length // block_size)
    gathered = _gather(cache, table[None, :blocks])[:, :, :length]
    keys, values = gathered[..., :size], gathered[..., size:]
    states, is_grouped = query.transpose(0, 1)[None], heads != kv_heads
    if count == length and form.window is None and form.soft_cap is None:
        attended = scaled_dot_product_attention(states, keys, values, is_causal=True, scale=form.scale, enable_gqa=is_grouped)
        return attended[0].transpose(0, 1)
    positions, seen = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
    visible = seen <= positions
    if form.window is not None:
        visible &= seen > positions - form.window
    if form.soft_cap is None:
        attended = scaled_dot_product_attention(states, keys, values, attn_mask=visible, scale=form.scale, enable_gqa=is_grouped)
        return attended[0].transpose(0, 1)
    grouped = states.reshape(kv_heads, heads // kv_heads, count, size)
    scores = _capped(torch.matmul(grouped, keys[0][:, None].transpose(-1, -2)).float() * form.scale, form)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).to(query.dtype)
    return torch.matmul(weights, values[0][:, None]).reshape(heads, count, size).transpose(0, 1)


def _capped(scores: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    return scores if form.soft_cap is None else form.soft_cap * torch.tanh(scores / form.soft_cap)


def _gather(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The blocks of `table` `[S, blocks]` in one copy: `[S, K, blocks · B, 2 · D]`."""
    num_blocks, kv_heads, block_size, content = cache.shape
    sequences, blocks = table.shape
    pages = (table[:, None, :] * kv_heads + torch.arange(kv_heads)[None, :, None]).reshape(-1)
    rows = cache.view(num_blocks * kv_heads, block_size * content)
    return rows.index_select(0, pages).view(sequences, kv_heads, blocks * block_size, content)
