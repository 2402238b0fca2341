"""Trivet on one machine: the `trivet` command, which starts the three services, and `LLM`, which does so for one's own program.

Nothing here computes, and torch is only imported where one process is asked for. The public names come when they are first used, for the
command must be able to begin without them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet_frontend.offline import CompletionOutput, RequestOutput, SamplingParams
    from trivet_proto.errors import ErrorKind, TrivetError

    from trivet.llm import LLM

__all__ = ["LLM", "CompletionOutput", "ErrorKind", "RequestOutput", "SamplingParams", "TrivetError"]

_HOMES = {
    "LLM": "trivet.llm",
    "SamplingParams": "trivet_frontend.offline",
    "RequestOutput": "trivet_frontend.offline",
    "CompletionOutput": "trivet_frontend.offline",
    "TrivetError": "trivet_proto.errors",
    "ErrorKind": "trivet_proto.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
