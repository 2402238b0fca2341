"""Weights in the blocks of a file: exactly the file's values, of any kind, several kinds in one model; what cannot be is named."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from trivet_checkpoint import Checkpoint, open_checkpoint, resolve_model
from trivet_checkpoint.quantization import dequantize, format_of
from trivet_kernels import reference
from trivet_kernels.cpu.decoder import WeightFormat
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_kernels.cpu.operators import PackedWeight, packed_rows
from trivet_proto.errors import TrivetError
from trivet_worker.forward_context import ForwardContext, forward_context
from trivet_worker.models.native_llama import NativeLlama, formats_of
from trivet_worker.weights import loader
from trivet_worker.weights.packed_rows import BLOCK_FORMATS
from trivet_worker.weights.quantization import Quantization

try:
    native_library()
except NotBuilt as reason:
    pytest.skip(str(reason), allow_module_level=True)

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's half-precision numbers lie; in the other kinds at 0."""


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_stand_for_the_very_values_that_the_checkpoint_reads(kind: str) -> None:
    generator = np.random.default_rng(1)
    stored_as, rows, columns = format_of(kind), 70, 512
    blocks = generator.integers(0, 256, (rows * columns // stored_as.block, stored_as.bytes), dtype=np.uint8)
    for place in HALVES.get(kind, (0,)):
        blocks[:, place : place + 2] = generator.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    weight = PackedWeight.empty(BLOCK_FORMATS[kind], rows, columns)
    stored = torch.from_numpy(blocks.reshape(rows, -1))
    weight.fill_blocks(stored[:32], BLOCK_FORMATS[kind])
    weight.fill_blocks(stored[32:], BLOCK_FORMATS[kind], 32)
    expected = dequantize(kind, (rows, columns), blocks.reshape(-1))
    assert np.array_equal(packed_rows(torch.arange(rows), weight).numpy(), expected)
    for format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16, WeightFormat.INT8, WeightFormat.Q8_MINIMUM):
        from_blocks, from_values = (PackedWeight.empty(format, rows, columns) for _ in range(2))
        from_blocks.fill_blocks(stored, BLOCK_FORMATS[kind])
        from_values.fill(torch.from_numpy(expected))
        assert torch.equal(from_blocks.data, from_values.data), format


def test_eight_bits_keep_values_of_any_few_levels_and_lose_little_of_others() -> None:
    generator = torch.Generator().manual_seed(2)
    levels = torch.randint(0, 16, (64, 256), generator=generator).float()
    weight = PackedWeight.empty(WeightFormat.Q8_MINIMUM, 128, 256)
    others = torch.randn(64, 256, generator=generator)
    weight.fill(torch.cat([levels * 0.03 - 0.2, others]))
    kept = packed_rows(torch.arange(128), weight)
    assert (kept[:64] - (levels * 0.03 - 0.2)).abs().max() < 2e-4, "half precision of scale and minimum is all that is lost"
    spread = others.view(64, -1, 32)
    step = (spread.amax(dim=-1) - spread.amin(dim=-1)) / 240
    assert ((kept[64:] - others).view(64, -1, 32).abs() <= 0.6 * step[..., None]).all()


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The packaged model's first two layers."""
    packaged = open_checkpoint(resolve_model(None))
    return replace(packaged, config=packaged.config | {"num_hidden_layers": 2})


def stored_as(checkpoint: Checkpoint, folder: Path, kinds: dict[str, str]) -> Checkpoint:
    """The same with some tensors in other kinds, in files of their own."""
    tensors = dict(checkpoint.tensors)
    for name, kind in kinds.items():
        file = folder / name
        gguf.quants.quantize(checkpoint.load(name), gguf.GGMLQuantizationType[kind]).tofile(file)
        tensors[name] = replace(tensors[name], kind=kind, file=file, offset=0, size=file.stat().st_size, rotary_heads=0)
    return replace(checkpoint, tensors=tensors)


def logits(checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization) -> torch.Tensor:
    """Of a few tokens without attention: every product but those of the scores."""
    formats = formats_of(checkpoint, dtype, quantization)
    model = NativeLlama(checkpoint.config, dtype=dtype, kv_dtype=dtype, formats=formats, max_model_len=64, most_tokens=64, threads=2)
    loader.load_weights(checkpoint, model.placements(), lambda done, total: None)
    ids = torch.arange(1000, 1040)
    with forward_context(ForwardContext(reference, None, {})):
        return model.step(ids, torch.arange(40), torch.arange(40), wants_hidden=False).logits


def test_a_file_of_several_kinds_runs_in_place_and_keeps_to_its_values(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prefix = "model.layers.1"
    kinds = {f"{prefix}.self_attn.v_proj.weight": "Q8_0", f"{prefix}.mlp.up_proj.weight": "Q5_0", f"{prefix}.mlp.down_proj.weight": "Q5_1"}
    several = stored_as(checkpoint, tmp_path, kinds)
    formats = formats_of(several, torch.float32, "gguf")
    assert formats.layers is WeightFormat.MIXED
    expected = logits(several, torch.float32, "none")
    assert (logits(several, torch.float32, "gguf") - expected).abs().max() < 5e-3 * expected.abs().max()
    assert (logits(several, torch.float32, "int8") - expected).abs().max() < 2e-2 * expected.abs().max()


def test_a_kind_that_is_not_computed_on_is_named_with_its_tensor(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(TrivetError, match=rf"{name} as F16; computed on in the file's own form are Q4_0, .*Take quantization none"):
        formats_of(stored_as(checkpoint, tmp_path, {name: "F16"}), torch.float32, "gguf")
