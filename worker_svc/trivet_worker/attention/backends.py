"""Attention backends: capabilities are declared, not discovered by crashing.

Selection walks the backends from the fastest; each answers nothing or the reason why it cannot. An explicit choice that does not fit is
an error, never a silent fallback.
"""

from dataclasses import dataclass, field

import torch
from trivet_kernels import reference
from trivet_kernels.api import Operators
from trivet_kernels.cpu.decoder import SUB_BLOCK
from trivet_proto.errors import ErrorKind, TrivetError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model and its settings ask of a backend."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int
    block_size: int
    sliding_window: int | None = None
    latent: bool = False  # MLA
    sinks: bool = False
    bidirectional: bool = False
    native: str | None = "this model has no native form"  # why it cannot run natively; None: it can


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A set of operators and what it can do. Empty sets mean: any."""

    name: str
    operators: Operators
    dtypes: frozenset[torch.dtype]
    head_sizes: frozenset[int] = field(default_factory=frozenset)
    kv_dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)  # of the cache, beside the model's own
    block_size_multiple: int = 1
    sliding_window: bool = False
    latent: bool = False
    sinks: bool = False
    bidirectional: bool = False
    native: bool = False  # runs the whole step in native code, so the model needs a native form

    def reason_against(self, needs: AttentionNeeds) -> str | None:
        """None when it can serve those needs."""
        if self.native and needs.native is not None:
            return needs.native
        if needs.dtype not in self.dtypes:
            return f"no {needs.dtype}; it takes {', '.join(sorted(map(str, self.dtypes)))}"
        if needs.kv_dtype != needs.dtype and needs.kv_dtype not in self.kv_dtypes:
            return f"no KV cache in {needs.kv_dtype} beside {needs.dtype}"
        if self.head_sizes and needs.head_size not in self.head_sizes:
            return f"no heads of {needs.head_size}; it takes {sorted(self.head_sizes)}"
        if needs.block_size % self.block_size_multiple:
            return f"no blocks of {needs.block_size} tokens; multiples of {self.block_size_multiple} only"
        for feature in ("latent", "sinks", "bidirectional"):
            if getattr(needs, feature) and not getattr(self, feature):
                return f"no {feature} attention"
        if needs.sliding_window is not None and not self.sliding_window:
            return f"no sliding window; with max_model_len {needs.sliding_window} or less there is none"
        return None


CPU = AttentionBackend(
    "cpu",
    reference,
    frozenset({torch.float32, torch.bfloat16}),
    kv_dtypes=frozenset({torch.int8}),
    block_size_multiple=SUB_BLOCK,
    sliding_window=True,
    native=True,
)
TORCH = AttentionBackend("torch", reference, frozenset({torch.float32, torch.bfloat16, torch.float16}))

# Fastest first.
BACKENDS: tuple[AttentionBackend, ...] = (CPU, TORCH)


@dataclass(frozen=True, slots=True)
class Selection:
    backend: AttentionBackend
    rejected: tuple[tuple[str, str], ...]  # name, reason


def select_backend(needs: AttentionNeeds, wanted: str = "auto", backends: tuple[AttentionBackend, ...] = BACKENDS) -> Selection:
    """Raises FAILED_PRECONDITION with every backend's reason when none fits, or when the wanted one does not."""
    rejected: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.reason_against(needs)
        if wanted not in ("auto", backend.name):
            continue
        if reason is None:
            return Selection(backend, tuple(rejected))
        rejected.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or f"known are {', '.join(b.name for b in backends)}"
    raise TrivetError(
        ErrorKind.FAILED_PRECONDITION, f"attention_backend {wanted} does not serve this model: {reasons}", param="attention_backend"
    )
