"""Prompts and request bodies, made before a run and shared by all servers that are compared in it.

Everything follows from a seed: the same seed, workload and run give the same bodies, another seed gives other prompts, so that no prefix
cache answers but where a workload shares. A prompt is common English words, nearly always a token each in any vocabulary (the server's
own count is what is reported), or token ids.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trivet.bench.load.workloads import Workload

WORDS = Path(__file__).with_name("words.txt").read_text().split()


class PromptForm(StrEnum):
    WORDS = "words"
    IDS = "ids"


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What all requests of a command have in common."""

    form: PromptForm
    vocabulary: range  # token ids are drawn from it
    endpoint: Endpoint
    ignore_eos: bool
    extra: dict[str, object]  # further fields, for servers that want them


def make_bodies(workload: Workload, seed: str, options: BodyOptions, model: str | None) -> Sequence[bytes]:
    """One serialised request body for each request of the workload."""
    shared = _tokens(random.Random(f"{seed} shared"), workload.shared_tokens, options)
    bodies = []
    for index in range(workload.requests):
        source = random.Random(f"{seed} {index}")
        own = _tokens(source, workload.own_tokens.draw(source), options)
        bodies.append(_body(shared + own, workload.output_tokens.draw(source), options, model))
    return bodies


def _tokens(source: random.Random, count: int, options: BodyOptions) -> list[str | int]:
    return list(source.choices(WORDS if options.form is PromptForm.WORDS else options.vocabulary, k=count))


def _body(tokens: Sequence[str | int], output_tokens: int, options: BodyOptions, model: str | None) -> bytes:
    text = list(tokens) if options.form is PromptForm.IDS else " ".join(map(str, tokens))
    asked = {"messages": [{"role": "user", "content": text}]} if options.endpoint is Endpoint.CHAT else {"prompt": text}
    body: dict[str, object] = {
        **({"model": model} if model else {}),
        **asked,
        "max_tokens": output_tokens,
        "temperature": 0,
        **({"ignore_eos": True} if options.ignore_eos else {}),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options.extra,
    }
    return json.dumps(body).encode()
