"""Choosing a backend, the forward context, and cache memory."""

import dataclasses

import pytest
import torch
from trivet_kernels import reference
from trivet_proto.errors import TrivetError
from trivet_worker.attention.backends import AttentionBackend, AttentionNeeds, select_backend
from trivet_worker.attention.caches import strided_view
from trivet_worker.attention.spec import LayerCache
from trivet_worker.forward_context import ForwardContext, current_context, forward_context

NEEDS = AttentionNeeds(dtype=torch.float32, kv_dtype=torch.float32, head_size=64, block_size=16)
PICKY = AttentionBackend("picky", reference, frozenset({torch.bfloat16}), head_sizes=frozenset({128}), block_size_multiple=32)
PLAIN = AttentionBackend("plain", reference, frozenset({torch.float32, torch.bfloat16}))


def test_the_first_backend_that_fits_is_taken_and_the_others_have_reasons() -> None:
    selection = select_backend(NEEDS, backends=(PICKY, PLAIN))
    assert selection.backend is PLAIN
    assert selection.rejected == (("picky", "no torch.float32; it takes torch.bfloat16"),)


def test_an_explicit_choice_that_does_not_fit_is_an_error_with_the_reason() -> None:
    with pytest.raises(TrivetError, match=r"attention_backend picky does not serve this model: picky: no torch\.float32"):
        select_backend(NEEDS, "picky", (PICKY, PLAIN))


def test_a_backend_that_nobody_knows_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(TrivetError, match="known are picky, plain"):
        select_backend(NEEDS, "fancy", (PICKY, PLAIN))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.bfloat16}, "KV cache"),
        ({"sliding_window": 128}, "sliding window"),
        ({"latent": True}, "latent"),
        ({"sinks": True}, "sinks"),
        ({"bidirectional": True}, "bidirectional"),
    ],
)
def test_each_need_that_a_backend_lacks_is_a_reason(change, reason) -> None:
    assert reason in (PLAIN.reason_against(dataclasses.replace(NEEDS, **change)) or "")


@pytest.mark.parametrize(("change", "reason"), [({"head_size": 96}, "heads of 96"), ({"block_size": 16}, "blocks of 16")])
def test_sizes_that_do_not_fit_are_reasons(change, reason) -> None:
    fitting = AttentionNeeds(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_size=128, block_size=32)
    assert PICKY.reason_against(fitting) is None
    assert reason in (PICKY.reason_against(dataclasses.replace(fitting, **change)) or "")


def test_the_context_is_only_there_inside_a_forward_and_nests() -> None:
    outer, inner = ForwardContext(reference, None, {}), ForwardContext(reference, None, {})
    with pytest.raises(RuntimeError, match="outside a forward"):
        current_context()
    with forward_context(outer):
        with forward_context(inner):
            assert current_context() is inner
        assert current_context() is outer
    with pytest.raises(RuntimeError, match="outside a forward"):
        current_context()


def test_a_layers_view_covers_its_flat_bytes_exactly() -> None:
    layer = LayerCache("layer", kv_heads=2, head_size=8, dtype=torch.bfloat16)
    flat = torch.zeros(5 * layer.page_bytes(4), dtype=torch.int8)
    view = strided_view(flat, layer, 5, 4)
    assert view.shape == (5, 2, 4, 16)
    view[3] = 1.0
    touched = flat.view(5, -1).ne(0).any(dim=1).tolist()
    assert touched == [False, False, False, True, False]
    assert view.numel() * 2 == flat.numel()
