"""Which class runs an architecture. Checked before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.attention.backends import AttentionNeeds
from trivet_worker.models import native_llama
from trivet_worker.models.llama import LlamaForCausalLM
from trivet_worker.models.native_llama import NativeLlama


@dataclass(frozen=True, slots=True)
class Forms:
    """An architecture as layers over a backend's operators, and as a whole native step where it has such a form."""

    layered: type[LlamaForCausalLM]
    native: type[NativeLlama] | None

    def reason_against_native(self, config: Mapping[str, Any], needs: AttentionNeeds) -> str | None:
        """Why this model cannot run a whole step natively with these settings; None when it can."""
        if self.native is None:
            return "this architecture has no native form"
        return native_llama.reason_against(config, needs)


LLAMA = Forms(LlamaForCausalLM, NativeLlama)
ARCHITECTURES = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA}


def forms_of(config: Mapping[str, Any]) -> Forms:
    """Raises FAILED_PRECONDITION for an architecture that is not served."""
    names = config.get("architectures") or []
    known = next((name for name in names if name in ARCHITECTURES), None)
    if known is None:
        listed, asked = ", ".join(ARCHITECTURES), ", ".join(names) or "unnamed"
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"the architecture {asked} is not served; served are {listed}")
    return ARCHITECTURES[known]
