"""What one layer's KV cache looks like: the floor plan from which block counts and bytes follow.

All specs are frozen. A page is one block of one layer. `tokens_per_state` is 1 for plain attention, larger where one state stands for
several tokens, a fraction where one token has several states.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, prod
from typing import Self

from trivet_proto.errors import invalid

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


def dtype_bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise invalid(f"KV cache dtype {dtype} is not known; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The root: only subclasses describe a layer."""

    block_size: int  # tokens

    @property
    def num_heads(self) -> int:
        raise TypeError(f"{type(self).__name__} does not say its heads")

    @property
    def tokens_per_state(self) -> int | Fraction:
        return 1

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of one head."""
        raise TypeError(f"{type(self).__name__} does not say its states")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        states = ceil(Fraction(self.block_size) / Fraction(self.tokens_per_state))
        return self.num_heads * states * self.state_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request holds at most."""
        return self.blocks_for(max_model_len)

    def merged(self, other: "KVCacheSpec", names: tuple[str, str]) -> Self:
        """The spec that both layers can share. Raises INVALID_ARGUMENT naming both when they differ."""
        if self != other:
            raise invalid(f"layers {names[0]} and {names[1]} must share a KV cache spec but differ: {self} and {other}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `kv_heads` heads."""

    kv_heads: int
    head_size: int
    head_size_v: int | None = None  # None: as the keys
    dtype: str
    quantization: str = ""
    states: int | Fraction = 1  # tokens per state

    @property
    def num_heads(self) -> int:
        return self.kv_heads

    @property
    def tokens_per_state(self) -> int | Fraction:
        return self.states

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def state_bytes(self) -> int:
        # int8 caches keep one float32 scale for the key and one for the value of each state.
        scales = 8 if self.quantization else 0
        return (self.head_size + self.value_size) * dtype_bytes(self.dtype) + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays. A window or chunk here means: allocate for all, compute within (no hybrid allocator)."""

    sliding_window: int | None = None
    chunk_size: int | None = None

    def merged(self, other: KVCacheSpec, names: tuple[str, str]) -> Self:
        """Windows may differ by one being absent; two different ones cannot share."""
        if not isinstance(other, FullAttentionSpec):
            raise invalid(
                f"layers {names[0]} and {names[1]} must share a KV cache spec but are {type(self).__name__} and {type(other).__name__}"
            )
        windows = {spec.sliding_window for spec in (self, other)} - {None}
        chunks = {spec.chunk_size for spec in (self, other)} - {None}
        if len(windows) > 1 or len(chunks) > 1 or (windows and chunks):
            raise invalid(f"layers {names[0]} and {names[1]} must share a KV cache spec but their windows differ: {self} and {other}")
        window, chunk = next(iter(windows), None), next(iter(chunks), None)
        if replace(self, sliding_window=window, chunk_size=chunk) != replace(other, sliding_window=window, chunk_size=chunk):
            raise invalid(f"layers {names[0]} and {names[1]} must share a KV cache spec but differ: {self} and {other}")
        return replace(self, sliding_window=window, chunk_size=chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last `window` tokens stay."""

    window: int

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        # One more block, since a window seldom begins at a block's first token.
        return self.blocks_for(min(self.window - 1 + max_num_batched_tokens, max_model_len)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Tokens see their own chunk only."""

    chunk_size: int

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.blocks_for(min(self.chunk_size + max_num_batched_tokens, max_model_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """States of the encoder's output, fixed once computed."""

    max_encoder_tokens: int

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.blocks_for(self.max_encoder_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent per token, no values of their own; rows padded to `alignment_bytes`."""

    alignment_bytes: int = 1

    def __post_init__(self) -> None:
        if self.head_size_v not in (None, 0) or self.kv_heads != 1:
            raise invalid("a latent attention cache has one head and no value size")

    @property
    def value_size(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        content = self.head_size * dtype_bytes(self.dtype)
        return -(-content // self.alignment_bytes) * self.alignment_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """Fixed states whatever the length. `none`: one state a request; `align`: two, at block borders; `all`: one a block."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cache_mode: str = "none"
    speculative_blocks: int = 0

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def page_size_bytes(self) -> int:
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        kept = {"none": 1, "align": 2, "all": self.blocks_for(max_model_len)}[self.cache_mode]
        return kept + self.speculative_blocks
