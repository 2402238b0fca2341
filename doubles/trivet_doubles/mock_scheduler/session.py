"""One frontend's session with the mock scheduler: its requests, their steps, what goes down.

It owns the requests by handle. At most one message waits to be written, so a frontend that reads slowly gets its tokens slowly. Three
things run side by side: reading, steps, load reports; `service.py` writes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.packing import unpack_i32, unpack_u32
from trivet_proto.sampling import child_seed
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_doubles.mock_scheduler.life import Life
from trivet_doubles.mock_scheduler.outputs import prompt_outputs, step_outputs
from trivet_doubles.mock_scheduler.request import ABORT, STOP, MockRequest
from trivet_doubles.narrowing import narrowed_choices
from trivet_doubles.tokens import TokenLaw

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0

Response = engine_pb2.SessionResponse


class DiedError(Exception):
    """The fault `die_after` came due."""


class MockSession:
    """The scheduler's end of one `Session` stream, but for the writing."""

    def __init__(self, life: Life) -> None:
        self.ready: asyncio.Queue[Response] = asyncio.Queue(maxsize=1)
        self.ended = asyncio.Event()  # from outside
        self._life = life
        self._requests: dict[int, MockRequest] = {}  # in order of arrival
        self._ended: list[MockRequest] = []  # outside a step: their finish is still to be said
        self._highest_handle = 0
        self._partial: engine_pb2.Add | None = None
        self._wake = asyncio.Event()
        self._told = asyncio.Event()  # there is something to report before the second is over
        self._drain_ms: int | None = None
        self._outputs = 0
        self._is_silent = self._has_stalled = False
        self._counted = (0, 0)

    def announce_drain(self, deadline_ms: int) -> None:
        """Tell the frontend that the scheduler leaves; what runs goes on, new requests are refused."""
        self._drain_ms = deadline_ms
        self._told.set()

    def close(self) -> None:
        """Its requests are nobody's any more."""
        self._requests.clear()
        self._count()

    # ---- up ----

    async def read(self, messages: AsyncIterator[engine_pb2.SessionRequest]) -> None:
        """Until the frontend ends the stream. Raises INVALID_ARGUMENT when it breaks the contract."""
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "add":
                self._take_add(message.add)
            elif kind == "stop":
                self._end(message.stop.handles, STOP)
            elif kind == "abort":
                self._end(message.abort.handles, ABORT)
            elif kind == "hello":
                raise invalid("a second hello on one stream")
            self._wake.set()

    def _end(self, handles: bytes, finish: int) -> None:
        for handle in unpack_u32(handles, "handles").tolist():
            request = self._requests.pop(handle, None)
            if request is not None:
                request.finish = finish
                self._ended.append(request)

    def _take_add(self, add: engine_pb2.Add) -> None:
        whole = self._join(add)
        if whole is None:
            return
        handles = unpack_u32(whole.handles, "handles").tolist()
        for handle in handles:
            if handle <= self._highest_handle:
                raise invalid(f"handle {handle} was used before in this epoch or does not rise", "handles")
            self._highest_handle = handle
        if not handles:
            raise invalid("a request without handles", "handles")
        for older in [request for request in self._requests.values() if request.uid == whole.uid]:
            del self._requests[older.handle]  # replaced: nothing more is said of its handle
        refusal = self._life.faults.refusal_of(self._life.next_add()) or self._refusal_of(whole, len(handles))
        for index, handle in enumerate(handles):
            request = self._child(whole, handle, index)
            if refusal is not None:
                request.fail(refusal)
            if request.finish:
                self._ended.append(request)
            else:
                self._requests[handle] = request

    def _join(self, add: engine_pb2.Add) -> engine_pb2.Add | None:
        """A prompt cut into several messages, whole; None while parts are missing."""
        if not add.HasField("part"):
            return add
        if add.part.index == 0:
            self._partial = add
        elif self._partial is None or self._partial.handles != add.handles:
            raise invalid("a part of a prompt came without its first part", "part")
        else:
            self._partial.prompt_token_ids += add.prompt_token_ids
        if add.part.index + 1 < add.part.count:
            return None
        whole, self._partial = self._partial, None
        return whole

    def _refusal_of(self, add: engine_pb2.Add, children: int) -> TrivetError | None:
        """What the request can never run for."""
        card, prompt = self._life.card, unpack_i32(add.prompt_token_ids, "prompt_token_ids")
        if self._life.draining:
            return TrivetError(ErrorKind.UNAVAILABLE, "the mock scheduler is shutting down")
        most = add.sampling.max_tokens if add.sampling.HasField("max_tokens") else 1
        if add.task not in (types_pb2.TASK_UNSPECIFIED, types_pb2.TASK_GENERATE):
            return TrivetError(ErrorKind.UNIMPLEMENTED, "the mock scheduler serves generation alone")
        if not prompt.size:
            return invalid("the prompt is empty", "prompt")
        if int(prompt.min()) < 0 or int(prompt.max()) >= card.vocab_size:
            return invalid(f"a prompt token is not in the vocabulary of {card.vocab_size}", "prompt")
        if len(prompt) + most > card.max_model_len:
            return invalid(f"the prompt has {len(prompt)} tokens and max_tokens is {most}, more than {card.max_model_len}", "max_tokens")
        if add.resume and len(add.resume) != children:
            return invalid(f"the request has {children} children, but what {len(add.resume)} had is given", "resume")
        return None

    def _child(self, add: engine_pb2.Add, handle: int, index: int) -> MockRequest:
        life, sampling = self._life, add.sampling
        prompt = unpack_i32(add.prompt_token_ids, "prompt_token_ids")
        resume = add.resume[index] if index < len(add.resume) else engine_pb2.ResumeState()
        output = unpack_i32(resume.output_token_ids, "resume")
        stops = set(unpack_i32(sampling.stop_token_ids, "stop_token_ids").tolist()) | (set() if sampling.ignore_eos else {*life.end_ids})
        choices = narrowed_choices(sampling)
        law = life.law if choices is None else TokenLaw(choices)
        cached = life.look_up(add.prompt_token_ids + add.cache_salt.encode(), len(prompt))
        now = life.clock.monotonic()
        return MockRequest(
            handle=handle,
            uid=add.uid,
            prompt=prompt,
            sampling=sampling,
            stop_ids=frozenset(stops),
            limit=min(life.card.max_model_len, len(prompt) + sampling.max_tokens)
            if sampling.HasField("max_tokens")
            else life.card.max_model_len,
            tokens=law.stream([*prompt.tolist(), *output.tolist()], child_seed(add.seed, index)),
            cached_tokens=cached,
            ready_at=now + (len(prompt) - cached) * life.settings.prompt_token_time,
            queued_at=now,
            num_output=len(output),
            finish=STOP if resume.done else 0,
            reports_start=not resume.cached_tokens_reported,
            reports_prompt=sampling.HasField("prompt_logprobs") and index == 0 and not resume.prompt_logprobs_reported,
        )

    # ---- down ----

    async def report(self) -> None:
        """The load once a second, which is the heartbeat too; a drain at once."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._told.wait()
            self._told.clear()
            deadline_ms, self._drain_ms = self._drain_ms, None
            if deadline_ms is not None:
                leaving = types_pb2.Draining(deadline_ms=deadline_ms, reason="the mock scheduler is shutting down")
                await self.ready.put(Response(draining=leaving))
            if not self._is_silent:
                await self.ready.put(Response(load=self._life.load()))

    async def step(self) -> None:
        """Steps while there are requests. Returns when the session is to end on cue, raises `DiedError` when the process is."""
        life = self._life
        due = life.clock.monotonic()
        while True:
            due = max(due, life.clock.monotonic()) + life.settings.step_time
            await self._until(due)
            await self._stall_on_cue()
            requests = self._advance()
            if not requests:
                await self._until_woken()
                continue
            choices = life.law.choices
            for outputs in prompt_outputs(requests, choices):
                await self.ready.put(Response(outputs=outputs))
            life.tokens += sum(len(request.fresh) for request in requests)
            outputs = step_outputs(requests, choices, life.clock.monotonic())
            self._outputs += 1
            life.outputs += 1
            life.last_output_at = life.clock.monotonic()
            life.faults.spoil(outputs, self._outputs)
            await self.ready.put(Response(outputs=outputs))
            self._count()
            if life.outputs == life.faults.die_after:
                await self.ready.join()
                raise DiedError
            if self._outputs == life.faults.end_session_after:
                await self.ready.join()
                logger.warning("the session ends on cue after %d outputs", self._outputs)
                return

    def _advance(self) -> list[MockRequest]:
        """Give the first requests their next tokens; returns those with something new, whoever ended without a step first."""
        life, now = self._life, self._life.clock.monotonic()
        changed, self._ended = self._ended, []
        for request in [*self._requests.values()][: life.settings.max_num_seqs]:
            if request.ready_at > now:
                continue
            request.advance(life.settings.tokens_per_step)
            failure = life.faults.failure_of(request.num_output)
            if failure is not None:
                request.fail(failure)
            if request.finish:
                del self._requests[request.handle]
            changed.append(request)
        return changed

    async def _until(self, due: float) -> None:
        left = due - self._life.clock.monotonic()
        if left > 0:
            await asyncio.sleep(left)

    async def _until_woken(self) -> None:
        """Nothing to do: until something comes up, or the first prefill is over."""
        self._count()
        self._wake.clear()
        coming = min((request.ready_at for request in self._requests.values()), default=None)
        timeout = None if coming is None else max(0.0, coming - self._life.clock.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()

    async def _stall_on_cue(self) -> None:
        faults = self._life.faults
        if faults.stall_after and self._outputs >= faults.stall_after and not self._has_stalled:
            self._has_stalled = True
            logger.warning("stalling for %g s%s", faults.stall_for, ", silently" if faults.silent else "")
            self._is_silent = faults.silent
            await asyncio.sleep(faults.stall_for)
            self._is_silent = False

    def _count(self) -> None:
        """Tell the scheduler's own numbers how many of this session's requests run and wait."""
        running = min(len(self._requests), self._life.settings.max_num_seqs)
        waiting = len(self._requests) - running
        self._life.running += running - self._counted[0]
        self._life.waiting += waiting - self._counted[1]
        self._counted = (running, waiting)
