"""Choosing a backend, the forward context, and cache memory."""

import dataclasses

import pytest
import torch
from trivet_kernels import reference
from trivet_proto.errors import TrivetError
from trivet_worker.attention.backends import TORCH, AttentionBackend, AttentionNeeds, AttentionType, select_backend
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
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, "no torch.float16; it takes torch.bfloat16, torch.float32"),
        ({"dtype": torch.bfloat16}, "no KV cache in torch.float32 beside torch.bfloat16"),
        ({"kv_dtype": torch.int8}, "no KV cache in torch.int8 beside torch.float32"),
        ({"window": 128}, "no sliding window; with max_model_len 128 or less there is none"),
        ({"soft_cap": 30.0}, "no soft cap of scores"),
        ({"latent": True}, "no latent attention"),
        ({"sinks": True}, "no sinks attention"),
        ({"attention_type": AttentionType.BIDIRECTIONAL}, "no bidirectional attention"),
    ],
)
def test_each_need_that_a_backend_lacks_is_a_reason(change, reason) -> None:
    assert PLAIN.reason_against(dataclasses.replace(NEEDS, **change)) == reason


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"head_sizes": frozenset({128, 80})}, "no heads of 64; it takes 80, 128"),
        ({"head_size_multiple": 48}, "no heads of 64; multiples of 48 only"),
        ({"block_sizes": frozenset({128, 32})}, "no blocks of 16 tokens; it takes 32, 128"),
        ({"block_size_multiple": 32}, "no blocks of 16 tokens; multiples of 32 only"),
        ({"supports_combination": lambda needs: f"not {needs.head_size} with {needs.block_size}"}, "not 64 with 16"),
        ({"head_sizes": frozenset({64}), "block_sizes": frozenset({16}), "block_size_multiple": 8}, None),
        ({"kv_dtypes": frozenset({torch.int8})}, None),
    ],
)
def test_sizes_are_declared_exactly_or_as_multiples(declared, reason) -> None:
    assert dataclasses.replace(PLAIN, **declared).reason_against(NEEDS) == reason


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, ("cpu: no torch.float64", "torch: no torch.float64")),
        ({"attention_type": AttentionType.BIDIRECTIONAL}, ("cpu: no bidirectional", "torch: no bidirectional")),
        ({"latent": True}, ("cpu: no latent", "torch: no latent")),
        ({"block_size": 8, "kv_dtype": torch.int8}, ("cpu: no blocks of 8", "torch: no KV cache in torch.int8")),
        ({"head_size": 40, "kv_dtype": torch.int8}, ("cpu: no heads of 40", "torch: no KV cache in torch.int8")),
    ],
)
def test_what_nobody_takes_is_refused_with_every_backend_and_its_reason(change, reasons) -> None:
    with pytest.raises(TrivetError) as refusal:
        select_backend(dataclasses.replace(NEEDS, **change))
    assert refusal.value.param == "attention_backend"
    for reason in reasons:
        assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"head_size": 40}, "no heads of 40"), ({"block_size": 24}, "no blocks of 24"), ({"heads_per_kv_head": 65}, "no 65 query heads")],
)
def test_what_the_native_operators_do_not_take_is_left_to_torch_with_the_reason(change, reason) -> None:
    selection = select_backend(dataclasses.replace(NEEDS, **change))
    assert selection.backend is TORCH
    ((name, said),) = selection.rejected
    assert name == "cpu"
    assert reason in said


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
