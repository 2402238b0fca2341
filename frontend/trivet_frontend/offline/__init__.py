"""Prompts in, whole answers out, in the caller's own process: the same road as both public APIs, without a server."""

from trivet_frontend.offline.batch import Batch
from trivet_frontend.offline.frontend import OfflineFrontend
from trivet_frontend.offline.outputs import CompletionOutput, RequestOutput
from trivet_frontend.offline.prompts import Prompt, brief
from trivet_frontend.offline.sampling_params import SamplingParams

__all__ = ["Batch", "CompletionOutput", "OfflineFrontend", "Prompt", "RequestOutput", "SamplingParams", "brief"]
