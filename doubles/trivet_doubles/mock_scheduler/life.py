"""What all sessions of a mock scheduler share: settings, faults, the model's card, counters, the prompts that were seen."""

import os
from collections import OrderedDict

from trivet_chassis.clock import Clock
from trivet_checkpoint import ModelBundle
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_doubles.mock_scheduler.config import MockSchedulerSettings
from trivet_doubles.mock_scheduler.faults import Faults
from trivet_doubles.model import DoubleModel

BLOCK = 16  # tokens: what the prefix cache that it plays counts in
MOST_PROMPTS = 4096


class Life:
    """One per mock scheduler; `faults` may be exchanged at any time."""

    def __init__(self, settings: MockSchedulerSettings, faults: Faults, model: DoubleModel, clock: Clock) -> None:
        """Raises INVALID_ARGUMENT for settings that the model does not allow."""
        self.settings = settings
        self.faults = faults
        self.clock = clock
        self.law = model.law(end_every=settings.end_every)
        self.bundle: ModelBundle = model.bundle
        context = settings.context(model.context)
        self.card: types_pb2.ModelCard = model.card(name=settings.served_model_name, max_model_len=context, block_size=BLOCK)
        self.end_ids = model.end_ids
        self.instance = os.urandom(16)
        self.draining = False
        self.epochs = 0
        self.sessions = 0
        self.running = 0
        self.waiting = 0
        self.adds = 0
        self.outputs = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tokens = 0
        self.last_output_at = clock.monotonic()
        self._prompts: OrderedDict[bytes, None] = OrderedDict()

    def next_epoch(self) -> types_pb2.Epoch:
        self.epochs += 1
        return types_pb2.Epoch(instance=self.instance, counter=self.epochs)

    def next_add(self) -> int:
        """The ordinal of the request that comes now, from 1."""
        self.adds += 1
        return self.adds

    def look_up(self, prompt: bytes, num_tokens: int) -> int:
        """Tokens of a prompt that a prefix cache would have: all its full blocks but the last token's, when it was here before."""
        known = prompt in self._prompts
        self._prompts[prompt] = None
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)
        cached = (num_tokens - 1) // BLOCK * BLOCK if known else 0
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached
        return cached

    def load(self) -> engine_pb2.Load:
        report = engine_pb2.Load(
            requests_running=self.running,
            requests_waiting=self.waiting,
            replicas_ready=0 if self.draining else self.settings.replicas,
            steps_total=self.outputs,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.tokens,
            prefix_cache_queries_total=self.prompt_tokens,
            prefix_cache_hits_total=self.cached_tokens,
        )
        busy, age = self.progress()
        if busy and age is not None:
            report.last_step_age_ms = int(age * 1000)
        return report

    def progress(self) -> tuple[bool, float | None]:
        """Whether there is work, and the age of the last output in seconds."""
        return self.running + self.waiting > 0, self.clock.monotonic() - self.last_output_at
