"""Every stored format against the reference implementation of the format's own package."""

import gguf
import numpy as np
import pytest
from trivet_checkpoint import dequantize
from trivet_checkpoint.quantization import FORMATS
from trivet_proto.errors import TrivetError

BLOCK_FORMATS = [name for name, format in FORMATS.items() if format.block > 1]
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random content with scales that are finite numbers."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, size=(rows * blocks, FORMATS[name].bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        scales = rng.normal(size=rows * blocks).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_decode_to_the_very_floats_of_the_reference(name: str) -> None:
    raw = random_blocks(name, 5, 3)
    reference = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(dequantize(name, reference.shape, raw.reshape(-1)), reference)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_decode_to_the_same_however_many_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, shape = random_blocks(name, 5, 3), (5, 3 * FORMATS[name].block)
    whole = dequantize(name, shape, raw.reshape(-1))
    for at_once in (1, 2, 4):  # of 15
        monkeypatch.setattr("trivet_checkpoint.quantization.VALUES_AT_ONCE", at_once * FORMATS[name].block)
        assert np.array_equal(dequantize(name, shape, raw.reshape(-1)), whole)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_floats_come_back(name: str, dtype: type) -> None:
    values = np.random.default_rng(1).normal(size=(3, 7)).astype(dtype)
    assert np.array_equal(dequantize(name, (3, 7), values.view(np.uint8).reshape(-1)), values.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = np.array([[1.0, -2.5, 3.140625]], dtype=np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    assert np.array_equal(dequantize("BF16", (1, 3), raw), values)


@pytest.mark.parametrize(
    ("kind", "shape", "size", "why"),
    [
        ("Q4_1", (2, 32), 39, "takes 40 bytes, there are 39"),
        ("Q4_K", (1, 32), 144, "no multiple"),
        ("Q3_K", (1, 256), 110, "cannot be read"),
        ("F32", (0, 1 << 62), 0, "larger than any array"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(kind: str, shape: tuple[int, ...], size: int, why: str) -> None:
    with pytest.raises(TrivetError, match=why):
        dequantize(kind, shape, np.zeros(size, dtype=np.uint8))
