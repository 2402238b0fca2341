"""How long native products, attention and whole decoder steps take at a model's shapes, with weights and caches of made-up values.

Values do not change the time (zeros would). Each time is the best of several rounds, in seconds. Nothing here knows what a machine could do
at most; `limits` does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trivet_kernels.cpu.decoder import HEAD, DecoderShape, NativeDecoder, Part, StepArrays, WeightFormat
from trivet_kernels.cpu.library import native_library
from trivet_kernels.pages import zeroed_bytes

BLOCK_SIZE = 16
# Bytes of a GGUF block of 32 values, and how many float16 it begins with.
GGUF_BLOCKS = {WeightFormat.Q4_0: (18, 1), WeightFormat.Q4_1: (20, 2), WeightFormat.Q8_0: (34, 1)}
TIMED_FORMATS = {
    "float32": WeightFormat.FLOAT32,
    "bfloat16": WeightFormat.BFLOAT16,
    "int8": WeightFormat.INT8,
    "q8_0": WeightFormat.Q8_0,
    "q4_1": WeightFormat.Q4_1,
    "q4_0": WeightFormat.Q4_0,
}
"""By the names that people give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedShape:
    """A decoder's sizes, its weights' format and its cache's type (float32 or bfloat16) by name."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    format: str
    cache: str


@dataclass(frozen=True, slots=True)
class ProductTime:
    seconds: float  # of all copies
    weight_bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class StepPart:
    """So many sequences in one step, each with `context` tokens in its cache and `new` tokens to run."""

    sequences: int
    context: int
    new: int = 1


def product_time(form: str, out: int, into: int, rows: int, *, copies: int, threads: int, rounds: int) -> ProductTime:
    """`rows` activations times so many weights `[out, into]`, as the decoder runs a linear layer. Raises NotBuilt and MemoryError."""
    source, kind = _source(TIMED_FORMATS[form], out, into)
    seconds = np.zeros(rounds, dtype=np.float64)
    size: int = native_library().trivet_time_matmul(
        threads, TIMED_FORMATS[form], out, into, source.ctypes.data, kind, copies, rows, rounds, seconds.ctypes.data
    )
    if size == 0:
        raise MemoryError(f"{copies} weights of {out} × {into} do not fit into memory")
    return ProductTime(float(seconds.min()), size, 2 * copies * out * into * rows)


class StepTimer:
    """A decoder of this shape, and caches for the largest step that it will be asked for. Raises NotBuilt, MemoryError, and
    ValueError for a shape that the native decoder does not take."""

    def __init__(self, shape: TimedShape, largest: Sequence[StepPart], *, threads: int) -> None:
        self._shape = shape
        most_tokens = max(part.sequences * part.new for part in largest)
        positions = max(part.context + part.new for part in largest)
        self._dtype = getattr(torch, shape.cache)
        self._decoder = _decoder(shape, self._dtype, most_tokens, threads)
        blocks = 1 + max(part.sequences * _blocks(part) for part in largest)
        size = blocks * BLOCK_SIZE * 2 * shape.kv_heads * shape.head_size
        # Written at once: memory that was never written is one page of zeros, which any cache holds.
        self._caches = [zeroed_bytes(size * self._dtype.itemsize).view(self._dtype).fill_(0.01) for _ in range(shape.layers)]
        angles = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, shape.head_size, 2) / shape.head_size)
        self._angles = angles.cos(), angles.sin()

    def seconds(self, part: StepPart, rounds: int) -> float:
        return self._best(part, self._caches, rounds)

    def attention_seconds(self, part: StepPart, rounds: int) -> float:
        """What of a step goes into attention: the step less the same step without."""
        return max(1e-9, self._best(part, self._caches, rounds) - self._best(part, None, rounds))

    def _best(self, part: StepPart, caches: Sequence[torch.Tensor] | None, rounds: int) -> float:
        arrays, best = _arrays(part, self._shape.vocab), float("inf")
        for _ in range(rounds + 1):  # the first warms up
            begun = time.perf_counter()
            self._decoder.run(arrays, caches, BLOCK_SIZE, self._angles)
            best = min(best, time.perf_counter() - begun)
        return best


def _blocks(part: StepPart) -> int:
    return -(-(part.context + part.new) // BLOCK_SIZE)


def _arrays(part: StepPart, vocab: int) -> StepArrays:
    """Each sequence has blocks of its own, in order; its last token is sampled."""
    blocks, tokens = _blocks(part), part.sequences * part.new
    table = (1 + np.arange(part.sequences * blocks, dtype=np.int32)).reshape(part.sequences, blocks)
    positions = np.tile(np.arange(part.context, part.context + part.new, dtype=np.int64), part.sequences)
    rows = np.repeat(np.arange(part.sequences), part.new)
    return StepArrays(
        token_ids=np.arange(tokens, dtype=np.int64) * 7919 % vocab,
        positions=positions,
        slots=table[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.arange(0, tokens + 1, part.new, dtype=np.int64),
        block_table=table,
        sampled_rows=np.arange(part.new - 1, tokens, part.new, dtype=np.int64),
    )


def _decoder(shape: TimedShape, cache: torch.dtype, most_tokens: int, threads: int) -> NativeDecoder:
    form = TIMED_FORMATS[shape.format]
    native = DecoderShape(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        inner=shape.inner,
        vocab=shape.vocab,
        epsilon=1e-5,
        most_tokens=most_tokens,
        threads=threads,
        cache=cache,
        format=form,
        head_format=form,
    )
    if (reason := native.reason_against()) is not None:
        raise ValueError(f"the native decoder takes {reason}")
    decoder = NativeDecoder(native)
    query = shape.heads * shape.head_size
    sizes = {
        Part.QKV: (query + 2 * shape.kv_heads * shape.head_size, shape.hidden),
        Part.OUTPUT: (shape.hidden, query),
        Part.GATE_AND_UP: (2 * shape.inner, shape.hidden),
        Part.DOWN: (shape.hidden, shape.inner),
    }
    for part, (out, into) in sizes.items():
        source, kind = _source(form, out, into)
        for layer in range(shape.layers):
            _fill(decoder, layer, part, source, kind)
    for layer in range(shape.layers):
        for norm in (Part.ATTENTION_NORM, Part.MLP_NORM):
            decoder.norm(layer, norm).fill_(1.0)
    decoder.norm(HEAD).fill_(1.0)
    _fill(decoder, HEAD, Part.DOWN, *_source(form, shape.vocab, shape.hidden))
    return decoder


def _fill(decoder: NativeDecoder, layer: int, part: Part, source: NDArray[np.float32] | NDArray[np.uint8], kind: int) -> None:
    if kind == 0:
        decoder.fill(layer, part, torch.from_numpy(source))
    else:
        decoder.fill_blocks(layer, part, torch.from_numpy(source), decoder.shape.format)


def _source(form: WeightFormat, out: int, into: int) -> tuple[NDArray[np.float32] | NDArray[np.uint8], int]:
    """Rows to pack weights from, and what they are: 0 floats, 2 GGUF blocks."""
    generator = np.random.default_rng(0)
    if form not in GGUF_BLOCKS:
        return generator.standard_normal((out, into), dtype=np.float32) / np.float32(into**0.5), 0
    size, floats = GGUF_BLOCKS[form]
    blocks = generator.integers(0, 256, (out, into // 32, size), dtype=np.uint8)
    blocks[:, :, : 2 * floats] = np.full(floats, 0.01, dtype=np.float16).view(np.uint8)
    return blocks.reshape(out, -1), 2


def attention_shape(shape: TimedShape, layers: int) -> TimedShape:
    """The same attention, with as little as there may be beside it."""
    return replace(shape, layers=layers, inner=32, vocab=32)
