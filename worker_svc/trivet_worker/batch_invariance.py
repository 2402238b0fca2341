"""Whether a token's logits depend on what else is in its step: what the setting asks for, and what the chosen backend holds.

Nothing is switched here. The native decoder sums in one order whatever the batch (docs/decisions/0004), so it always holds, at no cost;
torch's own kernels choose theirs by shape, so with them it cannot.
"""

import logging
from typing import Literal

from trivet_proto.errors import ErrorKind, TrivetError

logger = logging.getLogger(__name__)

BatchInvariance = Literal["auto", "on", "off"]


def holds_batch_invariance(wanted: BatchInvariance, *, is_native: bool, reasons: str) -> bool:
    """What holds; said in the log. Raises FAILED_PRECONDITION when it is wanted and cannot be had; `reasons` say why not."""
    if is_native:
        beside = "; off changes nothing, since it costs nothing" if wanted == "off" else ""
        logger.info("batch invariance holds: a token's logits do not depend on what else is in its step%s", beside)
        return True
    if wanted == "on":
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"batch_invariant on: only the attention backend cpu holds it, which does not run here ({reasons}). "
            "Take batch_invariant auto, or settings that the backend cpu takes",
            param="batch_invariant",
        )
    logger.info(
        "batch invariance does not hold: torch's kernels sum in an order that depends on the batch, so last bits of logits can differ"
    )
    return False
