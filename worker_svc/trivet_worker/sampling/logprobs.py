"""Log probabilities of tokens: the chosen one with its rank, and others beside it. Never NaN, never infinite."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trivet_proto.v1 import types_pb2

FLOOR = -9999.0  # stands for an impossible token

PROCESSED = (types_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS)
"""Of what is left after every step of the order; the others are of the logits as the model gave them."""

LOGITS = (types_pb2.LOGPROBS_MODE_RAW_LOGITS, types_pb2.LOGPROBS_MODE_PROCESSED_LOGITS)
"""Not normalised."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Per token: the chosen id first, then the others. Ragged, as in the contract."""

    counts: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    values: NDArray[np.float32]
    ranks: NDArray[np.int32]
