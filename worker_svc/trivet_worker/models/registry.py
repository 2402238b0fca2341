"""Which class runs an architecture. Checked before any weight is read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trivet_checkpoint import Checkpoint, served_architecture

from trivet_worker.attention.backends import AttentionNeeds
from trivet_worker.models import native_llama
from trivet_worker.models.llama import LlamaForCausalLM, check_served
from trivet_worker.models.llama_tensors import needed_tensors, weight_values
from trivet_worker.models.native_llama import NativeLlama
from trivet_worker.weights.placement import NeededTensor


@dataclass(frozen=True, slots=True)
class Forms:
    """An architecture as layers over a backend's operators, and as a whole native step where it has such a form."""

    layered: type[LlamaForCausalLM]
    native: type[NativeLlama] | None
    tensors: Callable[[Mapping[str, Any]], Iterator[NeededTensor]]
    """What either form needs of a checkpoint, told by the config alone, layer after layer as it is asked for."""
    weight_values: Callable[[Mapping[str, Any]], int]
    """How many numbers those have."""
    check_served: Callable[[Mapping[str, Any], str], None]
    """Raises FAILED_PRECONDITION, with the config's file, for a feature that neither form has."""

    def reason_against_native(self, config: Mapping[str, Any], needs: AttentionNeeds) -> str | None:
        """Why this model cannot run a whole step natively with these settings; None when it can."""
        if self.native is None:
            return "this architecture has no native form"
        return native_llama.reason_against(config, needs)


LLAMA = Forms(LlamaForCausalLM, NativeLlama, needed_tensors, weight_values, check_served)
ARCHITECTURES = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA}


def forms_of(checkpoint: Checkpoint) -> Forms:
    """Raises FAILED_PRECONDITION for an architecture that is not served."""
    return ARCHITECTURES[served_architecture(checkpoint.config, str(checkpoint.config_file), ARCHITECTURES)]
