"""How an operator becomes known to torch: its schema, what runs on a CPU, and a fake for tracing."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("trivet", "FRAGMENT")  # type: ignore[no-untyped-call]
Implementation = Callable[..., Any]


def register(schema: str, on_cpu: Implementation, fake: Implementation) -> Implementation:
    """Gives the callable operator. Differentiation is not defined for any of them."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trivet::{name}", fake, lib=_LIBRARY)
    overload: Implementation = getattr(torch.ops.trivet, name).default
    return overload
