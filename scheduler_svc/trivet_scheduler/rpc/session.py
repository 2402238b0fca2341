"""One frontend's session: its requests by handle, its outbox, its silence.

Wire to domain: an `Add` becomes a request of the core, a `Stop` or `Abort` ends one. Every accepted `Add` gets exactly one finish or
error per handle. When the stream ends, what was asked over it is aborted.
"""

import logging

import numpy as np
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.packing import unpack_i32, unpack_u32
from trivet_proto.v1 import engine_pb2, types_pb2

from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.hashing import HashKeys
from trivet_scheduler.plan import Delta
from trivet_scheduler.request import Request, RequestSpec
from trivet_scheduler.rpc.outbox import Outbox

logger = logging.getLogger(__name__)

UID_BYTES = 16


class FrontendSession:
    """The scheduler's end of one `Session` stream."""

    def __init__(self, engine: Engine, hello: types_pb2.Hello, epoch: types_pb2.Epoch) -> None:
        self.name = hello.name
        self.epoch = epoch
        self.outbox = Outbox()
        self.heard_at = engine.clock.monotonic()
        self._engine = engine
        self._requests: dict[int, Request] = {}
        self._highest_handle = 0
        self._by_uid: dict[bytes, list[Request]] = {}
        self._partial: engine_pb2.Add | None = None

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

    # ---- up ----

    def take(self, message: engine_pb2.SessionRequest) -> None:
        """One message of the frontend. Raises when it breaks the contract; a request's own faults are answered on its handles."""
        self.heard_at = self._engine.clock.monotonic()
        kind = message.WhichOneof("message")
        if kind == "add":
            self._take_add(message.add)
        elif kind == "stop":
            for handle in unpack_u32(message.stop.handles, "stop.handles").tolist():
                if handle in self._requests:
                    self._engine.core.stop(self._requests[handle])
            self._engine.wake()
        elif kind == "abort":
            for handle in unpack_u32(message.abort.handles, "abort.handles").tolist():
                if handle in self._requests:
                    self._engine.core.abort(self._requests[handle])
            self._engine.wake()
        elif kind == "hello":
            raise invalid("a second hello on one stream")

    def _take_add(self, add: engine_pb2.Add) -> None:
        whole = self._join(add)
        if whole is None:
            return
        handles = unpack_u32(whole.handles, "handles").tolist()
        self._check_handles(handles)
        replaced = self._by_uid.pop(whole.uid, None)
        for request in replaced or ():
            self._requests.pop(request.handle, None)
            self.outbox.forget(request.handle)
            self._engine.core.abort(request)
        try:
            if self._engine.card is None:
                raise TrivetError(ErrorKind.UNAVAILABLE, "no worker has attached yet, so no model is served")
            if self._engine.draining:
                raise TrivetError(ErrorKind.UNAVAILABLE, "this scheduler is shutting down")
            spec = self._spec_of(whole, len(handles), self._engine.card)
            children = self._engine.core.add(spec, self, handles, whole.seed, self._engine.card.max_model_len)
        except TrivetError as error:
            for handle in handles:
                self.outbox.put_error(handle, error)
            return
        for request in children:
            self._requests[request.handle] = request
        self._by_uid[whole.uid] = list(children)
        self._engine.wake()

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

    def _check_handles(self, handles: list[int]) -> None:
        """A handle is never used twice in an epoch: they rise."""
        for handle in handles:
            if handle <= self._highest_handle:
                raise invalid(f"handle {handle} was used before in this epoch or does not rise", "handles")
            self._highest_handle = handle
        if not handles:
            raise invalid("a request without handles", "handles")

    def _spec_of(self, add: engine_pb2.Add, children: int, card: types_pb2.ModelCard) -> RequestSpec:
        if add.task not in (types_pb2.TASK_UNSPECIFIED, types_pb2.TASK_GENERATE):
            raise TrivetError(ErrorKind.UNIMPLEMENTED, f"the model does not serve {types_pb2.Task.Name(add.task)}; it serves generation")
        if add.HasField("structured_output"):
            raise TrivetError(ErrorKind.UNIMPLEMENTED, "structured output is not served yet", param="structured_output")
        if add.resume:
            raise TrivetError(ErrorKind.UNIMPLEMENTED, "taking over a started request is not served yet", param="resume")
        if add.media or add.adapter:
            raise TrivetError(ErrorKind.UNIMPLEMENTED, "the model takes no media and no adapters")
        if len(add.uid) != UID_BYTES:
            raise invalid(f"the uid has {len(add.uid)} bytes, {UID_BYTES} are needed", "uid")
        prompt = np.array(unpack_i32(add.prompt_token_ids, "prompt_token_ids"))
        if prompt.size and (int(prompt.min()) < 0 or int(prompt.max()) >= card.vocab_size):
            raise invalid(f"a prompt token is not in the vocabulary of {card.vocab_size}", "prompt")
        sampling = add.sampling
        stop_ids = set(unpack_i32(sampling.stop_token_ids, "stop_token_ids").tolist())
        if not sampling.ignore_eos:
            stop_ids |= set(unpack_i32(card.eos_token_ids).tolist())
        clock = self._engine.clock
        return RequestSpec(
            uid=add.uid,
            request_id=add.request_id,
            prompt=prompt,
            sampling=sampling,
            keys=HashKeys(salt=add.cache_salt.encode()),
            num_children=children,
            stop_ids=frozenset(stop_ids),
            min_tokens=sampling.min_tokens,
            read_prefix_cache=not add.skip_reading_prefix_cache,
            priority=add.priority,
            deadline=clock.monotonic() + add.timeout_ms / 1000 if add.HasField("timeout_ms") else None,
        )
