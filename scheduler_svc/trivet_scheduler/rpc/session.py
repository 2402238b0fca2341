"""One frontend's session: its requests by handle, its outbox, its silence.

Wire to domain: an `Add` becomes a request of the core, a `Stop` or `Abort` ends one. Every accepted `Add` gets exactly one finish or
error per handle. When the stream ends, what was asked over it is aborted.
"""

import asyncio
import logging

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_MESSAGE_BYTES
from trivet_proto.packing import unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.awake import AwakeTimer
from trivet_scheduler.engine import Engine
from trivet_scheduler.plan import Delta
from trivet_scheduler.report import load_report
from trivet_scheduler.request import Request
from trivet_scheduler.rpc.add import resume_of, spec_of
from trivet_scheduler.rpc.outbox import Outbox
from trivet_scheduler.stream_end import StreamEnd

logger = logging.getLogger(__name__)


class FrontendSession:
    """The scheduler's end of one `Session` stream."""

    def __init__(self, engine: Engine, hello: types_pb2.Hello) -> None:
        self.name = hello.name
        self.instance = hello.instance
        self.epoch = engine.next_epoch()
        self.outbox = Outbox()
        self.stream = StreamEnd(self._on_end)
        self._engine = engine
        self._silence = AwakeTimer(engine.clock, engine.pulse.tick_s)
        self._requests: dict[int, Request] = {}
        self._highest_handle = 0
        self._by_uid: dict[bytes, list[Request]] = {}
        self._partial: engine_pb2.Add | None = None

    def _on_end(self) -> None:
        self._engine.remove_session(self)
        self._requests.clear()
        self._by_uid.clear()

    # ---- down ----

    def take_delta(self, delta: Delta) -> None:
        handle = delta.request.handle
        if self._requests.get(handle) is not delta.request:
            return  # replaced by a newer request of its uid: nothing more is said of its handle
        self.outbox.put_delta(delta)
        if delta.finish is not None:
            del self._requests[handle]
            alive = self._by_uid.get(delta.request.spec.uid)
            if alive is not None and delta.request in alive:
                alive.remove(delta.request)
                if not alive:
                    del self._by_uid[delta.request.spec.uid]

    def take_model(self, card: types_pb2.ModelCard) -> None:
        self.outbox.put_control(engine_pb2.SessionResponse(model=engine_pb2.Model(card=card)))

    def take_readiness(self) -> None:
        """Told at once: until the frontend knows, it turns requests away that would be served, or sends what must wait."""
        self.outbox.put_load(load_report(self._engine))

    def announce_drain(self, deadline_ms: int) -> None:
        draining = types_pb2.Draining(deadline_ms=deadline_ms, reason="the scheduler is shutting down")
        self.outbox.put_control(engine_pb2.SessionResponse(draining=draining))

    async def watch(self) -> None:
        """Report once a beat; end the session of a silent frontend."""
        pulse = self._engine.pulse
        beats = 0.0
        while True:
            await asyncio.sleep(pulse.tick_s)
            beats += pulse.tick_s
            if beats >= pulse.beat_s:
                beats = 0.0
                self.outbox.put_load(load_report(self._engine))
            if self._silence.tick() > pulse.silence_s:
                self.stream.decide(TrivetError(ErrorKind.ABORTED, f"no heartbeat of frontend {self.name} for {pulse.silence_s:g} s"))

    # ---- up ----

    def take(self, message: engine_pb2.SessionRequest) -> None:
        """One message of the frontend. Raises when it breaks the contract; a request's own faults are answered on its handles."""
        if self.stream.is_decided:
            return
        self._silence.reset()
        kind = message.WhichOneof("message")
        if kind == "add":
            self._take_add(message.add)
        elif kind == "stop":
            for request in self._named(message.stop.handles, "stop.handles"):
                self._engine.core.stop(request)
            self._engine.wake()
        elif kind == "abort":
            for request in self._named(message.abort.handles, "abort.handles"):
                self._engine.core.abort(request)
            self._engine.wake()
        elif kind == "hello":
            raise invalid("a second hello on one stream")

    def _named(self, handles: bytes, name: str) -> list[Request]:
        """Those that are alive: a handle may be gone by the time its `Stop` or `Abort` comes."""
        return [self._requests[handle] for handle in unpack_u32(handles, name).tolist() if handle in self._requests]

    def _take_add(self, add: engine_pb2.Add) -> None:
        whole = self._join(add)
        if whole is None:
            return
        engine, handles = self._engine, unpack_u32(whole.handles, "handles").tolist()
        self._check_handles(handles)
        self._replace(whole.uid)
        try:
            if engine.card is None:
                raise TrivetError(ErrorKind.UNAVAILABLE, "no worker has attached yet, so no model is served")
            if engine.draining:
                raise TrivetError(ErrorKind.UNAVAILABLE, "this scheduler is shutting down")
            spec = spec_of(whole, len(handles), engine.card, engine.clock)
            resume = resume_of(whole, engine.card.vocab_size)
            children = engine.core.add(spec, self, handles, whole.seed, engine.card.max_model_len, resume)
        except TrivetError as error:
            for handle in handles:
                self.outbox.put_error(handle, error)
            return
        for request in children:
            self._requests[request.handle] = request
        self._by_uid[whole.uid] = list(children)
        engine.wake()

    def _replace(self, uid: bytes) -> None:
        """An `Add` whose uid is alive takes its place: the older one is aborted without another word."""
        for request in self._by_uid.pop(uid, ()):
            self._requests.pop(request.handle, None)
            self.outbox.forget(request.handle)
            self._engine.core.abort(request)

    def _join(self, add: engine_pb2.Add) -> engine_pb2.Add | None:
        """A prompt cut into several messages, whole; None while parts are missing."""
        if not add.HasField("part"):
            if self._partial is not None:
                raise invalid("a request came between the parts of another", "part")
            return add
        whole, part = self._partial, add.part
        due = 0 if whole is None else whole.part.index + 1
        if part.index != due or part.count <= part.index or (whole is not None and part.count != whole.part.count):
            raise invalid(f"part {part.index} of {part.count} of a prompt, but part {due} is due", "part")
        if whole is None:
            self._partial = whole = add
        elif whole.handles != add.handles:
            raise invalid("a part of one prompt came between the parts of another", "part")
        else:
            whole.part.index = part.index
            whole.prompt_token_ids += add.prompt_token_ids
        if len(whole.prompt_token_ids) > MAX_MESSAGE_BYTES:
            raise TrivetError(ErrorKind.TOO_LARGE, f"a prompt has more than {MAX_MESSAGE_BYTES} bytes in its parts", param="prompt")
        if part.index + 1 < part.count:
            return None
        self._partial = None
        return whole

    def _check_handles(self, handles: list[int]) -> None:
        """A handle is never used twice in an epoch: they rise."""
        if not handles:
            raise invalid("a request without handles", "handles")
        for handle in handles:
            if handle <= self._highest_handle:
                raise invalid(f"handle {handle} was used before in this epoch or does not rise", "handles")
            self._highest_handle = handle
