"""What every layer may read during one forward, and nobody outside: attention metadata, KV caches, operators.

A context manager sets it; contexts nest and restore. Reading it outside a forward is an error that says so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from trivet_kernels.api import Operators, PagedBatch


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """`batch` is None while profiling: attention layers then give zeros."""

    operators: Operators
    batch: PagedBatch | None
    caches: Mapping[str, torch.Tensor]  # layer → [blocks, kv heads, block size, 2 · head size]


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> ForwardContext:
    context = _current.get()
    if context is None:
        raise RuntimeError("the forward context is read outside a forward: run the model inside `forward_context(…)`")
    return context
