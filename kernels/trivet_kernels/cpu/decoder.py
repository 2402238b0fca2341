"""A Llama-type decoder that runs a whole step in native code: one call a step, one team of threads through all layers.

Weights are packed when they are put in and kept in the format chosen; the residual stream is float32. KV caches are the caller's, one flat
tensor per layer, in the layout of native/attention.h. Whatever else a batch holds and however its tokens came, a position's logits have
the same bits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from trivet_kernels.cpu.attention_signatures import CacheType
from trivet_kernels.cpu.library import Shape, Step, native_library

SUB_BLOCK = 16  # tokens; block sizes are multiples of it
HEAD_SIZE_MULTIPLE = 32
INNER_MULTIPLE = 32
CELLS = (torch.float32, torch.bfloat16)
"""What weights and embedding can come in, and what attention multiplies."""
CACHE_TYPES = {
    (torch.float32, torch.float32): CacheType.FLOAT32,
    (torch.bfloat16, torch.bfloat16): CacheType.BFLOAT16,
    (torch.float32, torch.int8): CacheType.INT8_FLOAT32,
    (torch.bfloat16, torch.int8): CacheType.INT8_BFLOAT16,
}
"""By what attention multiplies, and what the cache keeps."""
INT8_SCALES = 8
"""Bytes that a token of one key/value head takes beside its int8 numbers: a float32 scale for the key and one for the value."""


class WeightFormat(IntEnum):
    """How weights are kept and multiplied; the numbers are those of native/matmul.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # per output channel, activations per token
    Q4_0 = 3
    Q4_1 = 4
    Q8_0 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    Q8_MINIMUM = 11  # blocks of 32 bytes with a scale and a minimum, made of floats
    MIXED = 12  # rows of several block formats, see NativeDecoder.add_rows


class Part(IntEnum):
    """A layer's weights; the numbers are those of native/decoder.h."""

    ATTENTION_NORM = 0
    QKV = 1
    OUTPUT = 2
    MLP_NORM = 3
    GATE_AND_UP = 4
    DOWN = 5


HEAD = -1
"""The layer number of what belongs to no layer: the final norm and the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    epsilon: float
    most_tokens: int  # of a step
    threads: int
    cache: torch.dtype  # what attention multiplies, and the embedding's
    kv_dtype: torch.dtype | None = None  # what the KV cache keeps; None: as `cache`
    windows: tuple[int, ...] = ()  # by layer: tokens that a query sees at most, its own included, 0 for all; empty: all of all
    format: WeightFormat
    head_format: WeightFormat

    def reason_against(self) -> str | None:
        """Why the native decoder cannot run it; None when it can."""
        if self.head_size % HEAD_SIZE_MULTIPLE:
            return f"no heads of {self.head_size}: multiples of {HEAD_SIZE_MULTIPLE} only"
        if self.heads % self.kv_heads or self.heads // self.kv_heads > 64:
            return f"no {self.heads} query heads on {self.kv_heads} key/value heads"
        if self.inner % INNER_MULTIPLE:
            return f"no inner size of {self.inner}: multiples of {INNER_MULTIPLE} only"
        if (self.cache, self.kept) not in CACHE_TYPES:
            return f"no KV cache in {self.kept} beside {self.cache}"
        return None

    @property
    def kept(self) -> torch.dtype:
        """What the KV cache keeps."""
        return self.kv_dtype or self.cache


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step, as contiguous arrays: int64, but for the block table's int32."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]: block · block size + offset
    query_starts: NDArray[np.int64]  # [S + 1]
    block_table: NDArray[np.int32]  # [S, blocks]
    sampled_rows: NDArray[np.int64]  # [R]: tokens of which logits are wanted


class NativeDecoder:
    """Owns the packed weights and the threads. One step at a time. Raises NotBuilt and MemoryError."""

    def __init__(self, shape: DecoderShape) -> None:
        reason = shape.reason_against()
        assert reason is None, reason
        self.shape = shape
        self.shares_prefixes = True  # read once what sequences have in common; the bits are the same without
        self._library = native_library()
        native = Shape(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            inner=shape.inner,
            vocab=shape.vocab,
            most_tokens=shape.most_tokens,
            cache=CACHE_TYPES[shape.cache, shape.kept],
            format=shape.format,
            head_format=shape.head_format,
            threads=shape.threads,
            epsilon=shape.epsilon,
        )
        self._decoder = ctypes.c_void_p(self._library.trivet_decoder_create(ctypes.byref(native)))
        if not self._decoder:
            raise MemoryError("the weights do not fit into memory")
        for layer, window in enumerate(shape.windows):
            self._library.trivet_decoder_window(self._decoder, layer, window)

    def __del__(self) -> None:
        decoder = getattr(self, "_decoder", None)
        if decoder:
            self._library.trivet_decoder_destroy(decoder)

    # ---- weights ----

    def add_rows(self, layer: int, part: Part, format: WeightFormat, count: int) -> None:
        """The next `count` rows, a multiple of 32, of a layer's weight whose format is MIXED: they get a block format of their own.

        All rows are added, in order, before any is filled. Raises MemoryError.
        """
        if not self._library.trivet_decoder_add_rows(self._decoder, layer, part, format, count):
            raise MemoryError(f"no room for {count} rows in {format.name}")

    def fill(self, layer: int, part: Part, values: torch.Tensor, first_row: int = 0) -> None:
        """Put rows `[first_row, first_row + len)` of a weight, `[rows, in]` of any floating dtype, into their packed place."""
        values = values.contiguous() if values.dtype in CELLS else values.float().contiguous()
        is_bfloat16 = int(values.dtype == torch.bfloat16)
        self._library.trivet_decoder_fill(self._decoder, layer, part, values.data_ptr(), is_bfloat16, first_row, values.shape[0])

    def fill_blocks(self, layer: int, part: Part, rows: torch.Tensor, kind: WeightFormat, first_row: int = 0) -> None:
        """The same out of GGUF blocks, uint8 `[rows, bytes of a row]`: taken over without a change of value where their kind is the
        weight's own format, otherwise (of the formats that a file does not know) as the floats that they stand for."""
        rows = rows.contiguous()
        self._library.trivet_decoder_fill_blocks(self._decoder, layer, part, kind, rows.data_ptr(), first_row, rows.shape[0])

    def norm(self, layer: int, part: Part = Part.ATTENTION_NORM) -> torch.Tensor:
        """A norm's weight, float32 `[hidden]`, to be written; of layer HEAD: the final norm."""
        return self._floats(self._library.trivet_decoder_norm(self._decoder, layer, part), self.shape.hidden)

    def bias(self, layer: int, part: Part, width: int) -> torch.Tensor:
        """A part's bias, float32 `[width]`, zeros until written."""
        return self._floats(self._library.trivet_decoder_bias(self._decoder, layer, part), width)

    def embedding(self) -> torch.Tensor:
        """An embedding of its own `[vocab, hidden]`, in the cache's dtype, to be written; until it is asked for the head's rows serve."""
        size = self.shape.vocab * self.shape.hidden
        address = self._library.trivet_decoder_embedding(self._decoder)
        buffer = (ctypes.c_char * (size * self.shape.cache.itemsize)).from_address(address)
        return torch.frombuffer(buffer, dtype=self.shape.cache).view(self.shape.vocab, self.shape.hidden)

    def _floats(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)

    # ---- steps ----

    def run(
        self,
        step: StepArrays,
        caches: Sequence[torch.Tensor] | None,
        block_size: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits float32 `[R, vocab]` of the sampled rows, in the first rows of `logits` when given.

        `caches` has one tensor per layer; None runs without attention (profiling). `angles` are the cosines and sines of all positions,
        float32 `[positions, head size / 2]`. `hidden`, float32 `[T, hidden]`, takes the states after the final norm when given.
        """
        rows = len(step.sampled_rows)
        logits = torch.empty((rows, self.shape.vocab), dtype=torch.float32) if logits is None else logits[:rows]
        addresses = None if caches is None else np.array([cache.data_ptr() for cache in caches], dtype=np.uint64)
        native = Step(
            tokens=len(step.token_ids),
            token_ids=step.token_ids.ctypes.data,
            positions=step.positions.ctypes.data,
            slots=step.slots.ctypes.data,
            sequences=len(step.query_starts) - 1,
            query_starts=step.query_starts.ctypes.data,
            block_table=step.block_table.ctypes.data,
            table_stride=step.block_table.shape[1],
            block_size=block_size,
            shares_prefixes=int(self.shares_prefixes),
            cosines=angles[0].data_ptr(),
            sines=angles[1].data_ptr(),
            caches=None if addresses is None else addresses.ctypes.data,
            sampled=rows,
            sampled_rows=step.sampled_rows.ctypes.data,
            logits=logits.data_ptr(),
            normed=None if hidden is None else hidden.data_ptr(),
        )
        self._library.trivet_decoder_run(self._decoder, ctypes.byref(native))
        return logits

    def chunks_saved(self) -> int:
        """How many chunks of 256 positions the last step read once for several sequences, counted for each but one."""
        saved: int = self._library.trivet_decoder_chunks_saved(self._decoder)
        return saved

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[R, vocab]` of states after the final norm, float32 `[R, hidden]`, at most `most_tokens` of them."""
        hidden = hidden.contiguous()
        logits = torch.empty((len(hidden), self.shape.vocab), dtype=torch.float32)
        self._library.trivet_decoder_logits(self._decoder, hidden.data_ptr(), len(hidden), logits.data_ptr())
        return logits
