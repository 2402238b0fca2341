"""Frontends and workers that are played over real gRPC.

The played worker's law: the token after n tokens is n, whatever the prompt. So a lost or repeated token shows, on whichever worker.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import grpc
from model_worker import BLOCK
from trivet_chassis.rpc import error_of
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, pack_u32, unpack_i32, unpack_u8, unpack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

BUNDLE = b"a bundle"
DIGEST = hashlib.sha256(BUNDLE).digest()
SOON_S = 10.0
Message = TypeVar("Message")
VOCABULARY = 1000
CONTEXT = 64


def worker_hello(name: str = "replica", weights: bytes = b"w", instance: bytes = bytes(16)) -> worker_pb2.WorkerHello:
    spec = types_pb2.KvCacheSpec(block_size=BLOCK, num_heads=1, head_size=8, head_size_v=8, dtype="float32")
    spec.full_attention.SetInParent()
    card = types_pb2.ModelCard(
        name="m", vocab_size=VOCABULARY, max_model_len=CONTEXT, bundle_sha256=DIGEST, block_size=BLOCK, max_logprobs=5
    )
    card.fingerprint.weights = weights
    rank = worker_pb2.RankResources(layers=[types_pb2.LayerKvSpec(layer="layer", spec=spec)], kv_bytes_available=1 << 20, num_kv_blocks=40)
    limits = worker_pb2.WorkerLimits(block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=CONTEXT)
    hello = types_pb2.Hello(name=name, instance=instance, schema=SCHEMA)
    return worker_pb2.WorkerHello(
        hello=hello, card=card, ranks=[rank], limits=limits, abilities=worker_pb2.WorkerAbilities(steps_in_flight=2)
    )


class PlayedWorker:
    """Attaches and answers steps in order, while `go` is set; heartbeats in any case, unless `mute`."""

    def __init__(self, channel: grpc.aio.Channel, name: str = "replica", hello: worker_pb2.WorkerHello | None = None) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._out: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue()
        self.call = self.stub.Attach(endless(self._out))
        self.hello = hello or worker_hello(name)
        self.epoch = types_pb2.Epoch()
        self.go = asyncio.Event()
        self.go.set()
        self.mute = False
        self.activity = types_pb2.ACTIVITY_NONE
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: TrivetError | None = None
        self.drains: list[worker_pb2.Drain] = []
        self.answered = 0
        self.most_answers: int | None = None
        self.in_parts = False  # a row each
        self.forecasts_us: list[int] = []
        self.spoil: Callable[[worker_pb2.StepResult], None] = lambda result: None
        self._steps: asyncio.Queue[worker_pb2.Step] = asyncio.Queue()
        self._lengths: dict[int, int] = {}

    async def run(self) -> None:
        """Until the stream ends; `error` says how."""
        answering = asyncio.create_task(self._answer_all())
        try:
            self.say(hello=self.hello)
            async for message in self.call:
                await self._take(message)
        except grpc.aio.AioRpcError as failure:
            self.error = error_of(failure)
        finally:
            self.call.cancel()
            answering.cancel()
            self.ended.set()

    def say(self, **message: object) -> None:
        self._out.put_nowait(worker_pb2.AttachRequest(**message))  # type: ignore[arg-type]

    async def _take(self, message: worker_pb2.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "configure":
            self.epoch = message.configure.epoch
            if message.configure.bundle_wanted:
                await self.stub.PutBundle(iter([worker_pb2.PutBundleRequest(sha256=DIGEST, chunk=types_pb2.Chunk(data=BUNDLE))]))
            self.say(ready=worker_pb2.Ready(epoch=self.epoch))
            self.ready.set()
        elif kind == "heartbeat" and not self.mute:
            self.say(heartbeat=types_pb2.Heartbeat(activity=self.activity))
        elif kind == "drain":
            self.drains.append(message.drain)
        elif kind == "step":
            self.forecasts_us.append(message.step.forecast_us)
            self._steps.put_nowait(message.step)

    async def _answer_all(self) -> None:
        while True:
            step = await self._steps.get()
            await self.go.wait()
            if self.answered == self.most_answers:
                return
            result = self.answer(step)
            self.spoil(result)
            for part in split(result) if self.in_parts else (result,):
                self.say(result=part)
            self.answered += 1

    @property
    def num_held(self) -> int:
        """Steps that wait for their answer."""
        return self._steps.qsize()

    def answer(self, step: worker_pb2.Step) -> worker_pb2.StepResult:
        rows = []
        for new in step.new_requests:
            self._lengths[new.handle] = len(new.token_ids) // 4
            rows.append((new.handle, new.num_computed_tokens + new.num_scheduled_tokens))
        known = step.known
        handles = unpack_u32(known.handles).tolist()
        computed, scheduled = unpack_i32(known.num_computed_tokens).tolist(), unpack_i32(known.num_scheduled_tokens).tolist()
        rows += [(handle, before + count) for handle, before, count in zip(handles, computed, scheduled, strict=True)]
        counts, tokens = [], []
        for handle, end in rows:
            is_done = end == self._lengths[handle]
            counts.append(int(is_done))
            if is_done:
                tokens.append(self._lengths[handle])
                self._lengths[handle] += 1
        return worker_pb2.StepResult(
            last_iteration=True,
            epoch=self.epoch,
            step=step.step,
            status=worker_pb2.STEP_STATUS_DONE,
            handles=pack_u32([handle for handle, _ in rows]),
            token_counts=pack_i32(counts),
            token_ids=pack_i32(tokens),
        )


def split(result: worker_pb2.StepResult) -> list[worker_pb2.StepResult]:
    """One part for every row."""
    parts = []
    tokens = result.token_ids
    rows = len(result.handles) // 4
    for row in range(rows):
        part = worker_pb2.StepResult(epoch=result.epoch, step=result.step, last_iteration=True, part=types_pb2.Part(index=row, count=rows))
        part.status = result.status
        part.handles, part.token_counts = result.handles[4 * row : 4 * row + 4], result.token_counts[4 * row : 4 * row + 4]
        size = 4 * int(unpack_i32(part.token_counts)[0])
        part.token_ids, tokens = tokens[:size], tokens[size:]
        parts.append(part)
    return parts


class PlayedFrontend:
    """One session; reads it all the time and keeps what came, by handle."""

    def __init__(self, channel: grpc.aio.Channel, name: str = "frontend", instance: bytes = bytes(16)) -> None:
        self._out: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()
        self.call = engine_pb2_grpc.EngineServiceStub(channel).Session(endless(self._out))
        self.name = name
        self.instance = instance
        self.mute = False
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, types_pb2.Error] = {}
        self.card: types_pb2.ModelCard | None = None
        self.welcome: engine_pb2.Welcome | None = None
        self.load = engine_pb2.Load()
        self.draining: types_pb2.Draining | None = None
        self.ended = asyncio.Event()
        self.error: TrivetError | None = None

    async def run(self) -> None:
        try:
            self.say(hello=types_pb2.Hello(name=self.name, instance=self.instance, schema=SCHEMA))
            async for message in self.call:
                self._take(message)
        except grpc.aio.AioRpcError as failure:
            self.error = error_of(failure)
        finally:
            self.call.cancel()
            self.ended.set()

    def say(self, **message: object) -> None:
        self.send(engine_pb2.SessionRequest(**message))  # type: ignore[arg-type]

    def send(self, message: engine_pb2.SessionRequest) -> None:
        self._out.put_nowait(message)

    def add(self, handles: Sequence[int], prompt: Sequence[int], max_tokens: int, **fields: object) -> None:
        self.say(add=an_add(handles, prompt, max_tokens, **fields))

    def _take(self, message: engine_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self.welcome = message.welcome
        elif kind == "model":
            self.card = message.model.card
        elif kind == "draining":
            self.draining = message.draining
        elif kind == "load":
            self.load = message.load
            if not self.mute:
                self.say(heartbeat=types_pb2.Heartbeat())
        elif kind == "outputs":
            self._take_outputs(message.outputs)

    def _take_outputs(self, outputs: engine_pb2.StepOutputs) -> None:
        handles, ids = unpack_u32(outputs.handles).tolist(), unpack_i32(outputs.token_ids).tolist()
        for handle, count in zip(handles, unpack_i32(outputs.token_counts).tolist(), strict=True):
            self.tokens.setdefault(handle, []).extend(ids[:count])
            ids = ids[count:]
        for row, cached in zip(unpack_i32(outputs.first_rows).tolist(), unpack_i32(outputs.cached_tokens).tolist(), strict=True):
            self.cached[handles[row]] = cached
        for handle, finish in zip(handles, unpack_u8(outputs.finish_reasons).tolist(), strict=True):
            if finish:
                assert handle not in self.finishes, "one finish each"
                self.finishes[handle] = finish
        self.errors |= {row.handle: row.error for row in outputs.errors}

    async def until_finished(self, *handles: int) -> None:
        await until(lambda: set(handles) <= set(self.finishes) or self.ended.is_set())
        assert set(handles) <= set(self.finishes), self.error


def an_add(handles: Sequence[int], prompt: Sequence[int], max_tokens: int, **fields: object) -> engine_pb2.Add:
    """Uid: the first handle, unless given."""
    fields.setdefault("uid", handles[0].to_bytes(16, "big") if handles else bytes(16))
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens)
    return engine_pb2.Add(
        handles=pack_u32(list(handles)),
        prompt_token_ids=pack_i32(list(prompt)),
        sampling=sampling,
        seed=1,
        **fields,  # type: ignore[arg-type]
    )


async def end_of(call: "grpc.aio.StreamStreamCall[object, object]") -> TrivetError:
    """The error that a stream ends with, which nobody else reads."""
    failure: grpc.aio.AioRpcError | None = None
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        failure = error
    assert failure is not None, "the stream ended in peace"
    assert failure.code() is error_of(failure).appearance.grpc_status
    return error_of(failure)


async def endless(queue: asyncio.Queue[Message]) -> AsyncIterator[Message]:
    while True:
        yield await queue.get()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)
