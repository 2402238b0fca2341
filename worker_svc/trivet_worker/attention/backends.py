"""Attention backends: capabilities are declared, not discovered by crashing.

Selection walks the backends from the fastest; each answers nothing or the reason why it cannot. An explicit choice that does not fit is
an error, never a silent fallback. A backend is a set of operators and what they can do; whether a model also has a form that runs a whole
step natively is another question (`models/building.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from trivet_kernels import reference
from trivet_kernels.api import Operators
from trivet_kernels.cpu import operators as cpu_operators
from trivet_kernels.cpu.decoder import HEAD_SIZE_MULTIPLE, SUB_BLOCK
from trivet_kernels.cpu.library import NotBuilt, native_library
from trivet_proto.errors import ErrorKind, TrivetError


class AttentionType(Enum):
    """Which tokens a token sees."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model and its settings ask of a backend."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int
    block_size: int
    heads_per_kv_head: int = 1
    window: int | None = None
    soft_cap: float | None = None
    latent: bool = False  # MLA
    sinks: bool = False
    attention_type: AttentionType = AttentionType.CAUSAL


def no_limits(needs: AttentionNeeds) -> str | None:
    """For a backend whose declared sets say it all."""
    return None


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A set of operators and what it can do. Empty sets mean: any."""

    name: str
    operators: Operators
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)  # beside the dtype of the computation
    head_sizes: frozenset[int] = field(default_factory=frozenset)
    head_size_multiple: int = 1
    block_sizes: frozenset[int] = field(default_factory=frozenset)
    block_size_multiple: int = 1
    window: bool = False
    soft_cap: bool = False
    latent: bool = False
    sinks: bool = False
    attention_types: frozenset[AttentionType] = frozenset({AttentionType.CAUSAL})
    supports_combination: Callable[[AttentionNeeds], str | None] = no_limits  # nothing, or what the fields above cannot say
    batch_invariant: bool = False  # a row's bits depend on nothing beside it, also in its linear layers
    packs_weights: bool = False  # its linear layers are over packed weights, quantised ones among them

    def reason_against(self, needs: AttentionNeeds) -> str | None:
        """None when it can serve those needs."""
        if needs.dtype not in self.dtypes:
            return f"no {needs.dtype}; it takes {_listed(self.dtypes)}"
        if needs.kv_dtype != needs.dtype and needs.kv_dtype not in self.kv_dtypes:
            return f"no KV cache in {needs.kv_dtype} beside {needs.dtype}"
        sizes = (
            ("heads of {}", needs.head_size, self.head_sizes, self.head_size_multiple),
            ("blocks of {} tokens", needs.block_size, self.block_sizes, self.block_size_multiple),
        )
        for what, size, exact, multiple in sizes:
            if exact and size not in exact:
                return f"no {what.format(size)}; it takes {_listed(exact)}"
            if size % multiple:
                return f"no {what.format(size)}; multiples of {multiple} only"
        if needs.attention_type not in self.attention_types:
            return f"no {needs.attention_type.value} attention"
        for feature in ("latent", "sinks"):
            if getattr(needs, feature) and not getattr(self, feature):
                return f"no {feature} attention"
        if needs.window is not None and not self.window:
            return f"no sliding window; with max_model_len {needs.window} or less there is none"
        if needs.soft_cap is not None and not self.soft_cap:
            return "no soft cap of scores"
        return self.supports_combination(needs)


def _listed(values: frozenset[torch.dtype] | frozenset[int]) -> str:
    return ", ".join(
        map(str, sorted(values, key=lambda value: (not isinstance(value, int), value if isinstance(value, int) else str(value))))
    )


MOST_HEADS_PER_KV_HEAD = 64


def _cpu_combination(needs: AttentionNeeds) -> str | None:
    try:
        native_library()
    except NotBuilt as reason:
        return str(reason)
    if needs.heads_per_kv_head > MOST_HEADS_PER_KV_HEAD:
        return f"no {needs.heads_per_kv_head} query heads on one key/value head; at most {MOST_HEADS_PER_KV_HEAD}"
    return None


CPU = AttentionBackend(
    "cpu",
    cpu_operators,
    frozenset({torch.float32, torch.bfloat16}),
    kv_dtypes=frozenset({torch.int8}),
    head_size_multiple=HEAD_SIZE_MULTIPLE,
    block_size_multiple=SUB_BLOCK,
    window=True,
    soft_cap=True,
    supports_combination=_cpu_combination,
    batch_invariant=True,
    packs_weights=True,
)
TORCH = AttentionBackend("torch", reference, frozenset({torch.float32, torch.bfloat16, torch.float16}), window=True, soft_cap=True)

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
