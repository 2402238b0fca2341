"""The one road from a request to its answer, below both public APIs."""

from trivet_frontend.serving.followed_model import FollowedModel, read_template
from trivet_frontend.serving.generation import Generation
from trivet_frontend.serving.inference import Inference
from trivet_frontend.serving.metrics import FrontendMetrics
from trivet_frontend.serving.open_streams import OpenStreams
from trivet_frontend.serving.options import ChatInput, CompletionInput, GenerationOptions
from trivet_frontend.serving.outcome import ChoiceDelta, TokenLogprob, Usage
from trivet_frontend.serving.sampling import SamplingDefaults, defaults_from
from trivet_frontend.serving.served_model import ServedModel

__all__ = [
    "ChatInput",
    "ChoiceDelta",
    "CompletionInput",
    "FollowedModel",
    "FrontendMetrics",
    "Generation",
    "GenerationOptions",
    "Inference",
    "OpenStreams",
    "SamplingDefaults",
    "ServedModel",
    "TokenLogprob",
    "Usage",
    "defaults_from",
    "read_template",
]
