"""A worker's tie to the schedulers: attach to one, and when that ends attach again, until it is told to leave.

Owns the attachment at hand. Before it dials again the attachment has finished or discarded every step it held.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from trivet_chassis.clock import Clock
from trivet_chassis.metrics import software_version
from trivet_chassis.rpc import Dial, create_channel
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_worker.config import WorkerSettings
from trivet_worker.link.attachment import Attachment
from trivet_worker.link.home import Home
from trivet_worker.loading import LoadedModel
from trivet_worker.runner.limits import MOST_ITERATIONS
from trivet_worker.step_thread import StepThread

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
STABLE_S = 10.0
"""An attachment that held so long was a good one: what ended it is news, and the next dial comes soon."""

STEPS_IN_FLIGHT = 2

FOR_GOOD = frozenset({ErrorKind.FAILED_PRECONDITION, ErrorKind.ALREADY_EXISTS})
"""What a scheduler ends a stream with when dialling again cannot help: another model, a name that another process has taken."""


class SchedulerLink:
    """Keeps one attachment alive for as long as the process lives."""

    def __init__(
        self, settings: WorkerSettings, model: LoadedModel, thread: StepThread, clock: Clock, home: Home, *, dial: Dial = create_channel
    ) -> None:
        self._settings = settings
        self._model = model
        self._thread = thread
        self._clock = clock
        self._home = home
        self._dial = dial
        self._instance = os.urandom(16)
        self._attachment: Attachment | None = None
        self._leaving = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.observe: Callable[[worker_pb2.StepResult], None] = lambda result: None

    @property
    def is_attached(self) -> bool:
        """Steps come and are run."""
        return self._attachment is not None and self._attachment.is_ready

    @property
    def num_streams(self) -> int:
        return int(self._attachment is not None)

    @property
    def running_step_age_s(self) -> float | None:
        """Seconds since the step at hand began; None without one."""
        running = None if self._attachment is None else self._attachment.running
        return None if running is None else self._clock.monotonic() - running.since

    async def run(self) -> None:
        """Attach, again and again, until draining.

        Raises FAILED_PRECONDITION when this worker cannot serve there, ALREADY_EXISTS when another process has taken its name.
        """
        backoff = FIRST_BACKOFF_S
        while not self._leaving.is_set():
            started = self._clock.monotonic()
            address, reason = await self._attach_once()
            if self._leaving.is_set():
                return
            if reason is not None and reason.kind in FOR_GOOD:
                raise reason
            if backoff == FIRST_BACKOFF_S:
                words = "it ended the stream" if reason is None else reason.message
                logger.warning("the scheduler at %s: %s; dialling again", address, words)
            if self._clock.monotonic() - started >= STABLE_S:
                backoff = FIRST_BACKOFF_S
            await self._pause(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    def say_draining(self, deadline_s: float) -> None:
        """No new work, please. What runs here may finish within `deadline_s` seconds; this link does not dial again."""
        self._leaving.set()
        if self._attachment is not None:
            self._attachment.say_draining(deadline_s, "the worker is shutting down")

    async def _attach_once(self) -> tuple[str, TrivetError | None]:
        """Dial, and live with it until its end. Returns whom, and why it ended: None where the scheduler gave no reason."""
        reason: TrivetError | None = None
        address = ", ".join(self._settings.scheduler)
        try:
            address = await self._home.choose()
            attachment = self._attachment = Attachment(
                address,
                self._hello(),
                self._model,
                self._thread,
                self._clock,
                dial=self._dial,
                on_change=self._changed,
                observe=self.observe,
            )
            try:
                reason = await attachment.run()
            finally:
                self._attachment = None
                self._home.lost(address, for_good=attachment.home_drains)
        except TrivetError as error:
            reason = error
        return address, reason

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
        except TimeoutError:
            return

    def _changed(self) -> None:
        if self._attachment is not None and self._attachment.is_ready:
            self._home.reached(self._attachment.address)
        self.on_change()

    def _hello(self) -> worker_pb2.WorkerHello:
        settings, model = self._settings, self._model
        rank = worker_pb2.RankResources(
            rank=0, layers=model.layers, kv_bytes_available=model.kv_bytes, device="cpu", attention_backend=model.backend.name
        )
        if settings.num_kv_blocks is not None:
            rank.num_kv_blocks = settings.num_kv_blocks
        limits = model.limits
        return worker_pb2.WorkerHello(
            hello=types_pb2.Hello(name=settings.replica_name, instance=self._instance, schema=SCHEMA, version=software_version()),
            role=types_pb2.REPLICA_ROLE_BOTH,
            parallel=worker_pb2.ParallelSizes(tensor=1, pipeline=1, data=1, prefill_context=1, decode_context=1),
            card=model.card,
            ranks=[rank],
            limits=worker_pb2.WorkerLimits(
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
            ),
            abilities=worker_pb2.WorkerAbilities(steps_in_flight=STEPS_IN_FLIGHT, run_ahead=MOST_ITERATIONS, zeroes_blocks=True),
        )
