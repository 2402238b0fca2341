"""Writing keys and values into the paged cache; the number of tokens is the slot mapping's."""

import torch

from trivet_kernels.reference.elementwise import rotary


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    _, _, block_size, content = cache.shape
    count = slot_mapping.shape[0]
    states = torch.cat([key[:count], value[:count]], dim=-1).to(cache.dtype)
    assert states.shape[-1] == content, (states.shape, cache.shape)
    if bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        states, slot_mapping = states[real], slot_mapping[real]
    # Indexing the block and offset dimensions together gives [T, K, content].
    cache[slot_mapping // block_size, :, slot_mapping % block_size] = states


def rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    write_kv(rotary(key, cosines, sines), value, cache, slot_mapping)
    return rotary(query, cosines, sines)
