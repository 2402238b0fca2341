"""Which class runs an architecture. Checked before any weight is read."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.spec import LayerCache
from trivet_worker.models.llama import LlamaForCausalLM
from trivet_worker.weights.placement import Placement


class Model(Protocol):
    """What the runner needs of a model."""

    vocab_size: int

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` twice → hidden states `[T, hidden]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[R, hidden]` → float32 `[R, vocabulary]`."""
        ...

    def layer_caches(self) -> list[LayerCache]:
        """What each attention layer wants cached."""
        ...

    def placements(self) -> list[Placement]:
        """Which checkpoint tensor goes where."""
        ...


ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM, "MistralForCausalLM": LlamaForCausalLM}


def build_model(config: Mapping[str, Any], dtype: torch.dtype, max_model_len: int) -> LlamaForCausalLM:
    """An empty model. Raises FAILED_PRECONDITION for an architecture or a feature of it that is not served."""
    names = config.get("architectures") or []
    known = next((name for name in names if name in ARCHITECTURES), None)
    if known is None:
        listed, asked = ", ".join(ARCHITECTURES), ", ".join(names) or "unnamed"
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"the architecture {asked} is not served; served are {listed}")
    return ARCHITECTURES[known](config, dtype=dtype, max_model_len=max_model_len)
