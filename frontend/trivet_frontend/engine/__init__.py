"""Sessions to schedulers: token in, token out."""

from trivet_frontend.engine.client import EngineClient
from trivet_frontend.engine.description import LoadReport, ModelDescription
from trivet_frontend.engine.identity import Identity, identity_of, software_version
from trivet_frontend.engine.request import (
    AbortReason,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from trivet_frontend.engine.submission import Submission
from trivet_frontend.engine.token_stream import TokenStream

__all__ = [
    "AbortReason",
    "EngineClient",
    "EngineRequest",
    "FinishReason",
    "Identity",
    "LoadReport",
    "ModelDescription",
    "SamplingParams",
    "Submission",
    "TokenDelta",
    "TokenLogprobs",
    "TokenStream",
    "identity_of",
    "software_version",
]
