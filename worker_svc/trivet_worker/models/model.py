"""What the runner needs of a model, whatever runs it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from trivet_worker.attention.spec import LayerCache
from trivet_worker.weights.placement import Placement


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits` of the sampled tokens, float32 `[R, vocabulary]`, good until the next step; `hidden`, `[T, hidden]`, when it was wanted."""

    logits: torch.Tensor
    hidden: torch.Tensor | None


class Model(Protocol):
    """A forward context is set around `step`."""

    vocab_size: int
    is_whole_step: bool
    """A step is one native call, with memory of its own; otherwise each operator's result is allocated."""

    def step(self, token_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, *, wants_hidden: bool) -> StepOutput:
        """Token ids and positions int64 `[T]`, and the tokens `[R]` of which logits are wanted."""
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

    def use_rope_factors(self, factors: torch.Tensor) -> None:
        """Rotary scaling that the checkpoint brings as a tensor."""
        ...
