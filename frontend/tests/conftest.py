"""A scheduler without a model, in this process: the real Session protocol, scripted tokens.

What a request gets is the list of token ids that `script` returns for it; faults are asked for by name. Everything that came up is
recorded.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc.aio
import httpx
import pytest
from trivet_chassis.clock import SystemClock
from trivet_checkpoint import bundle_of, open_checkpoint, resolve_model
from trivet_frontend.config import FrontendSettings
from trivet_frontend.server import Frontend
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u8, pack_u32, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2

VOCAB_SIZE = 49152
CONTEXT = 8192
EOS = 2


Outbox: TypeAlias = "asyncio.Queue[engine_pb2.SessionResponse | None]"


@dataclass
class Child:
    """One scripted child that runs."""

    add: engine_pb2.Add
    outbox: "Outbox"
    task: asyncio.Task[None]


Script = Callable[[engine_pb2.Add, int], list[int]]


def forced_or_counting(add: engine_pb2.Add, index: int) -> list[int]:
    """The id with the largest logit bias if one is above 50, else ids that depend on the prompt; ends at max_tokens."""
    count = min(add.sampling.max_tokens, 64)
    if add.sampling.logit_bias_ids:
        values = unpack_f32(add.sampling.logit_bias_values)
        if values.max() > 50:
            return [int(unpack_i32(add.sampling.logit_bias_ids)[values.argmax()])] * count
    start = int(unpack_i32(add.prompt_token_ids).sum()) + index
    return [1000 + (start + step) % 5000 for step in range(count)]


@dataclass
class FakeScheduler(engine_pb2_grpc.EngineServiceServicer):
    """What tests steer and look at."""

    address: str
    bundle: bytes
    digest: bytes
    name: str = "fake"
    instance: bytes = b"s" * 16
    weights: bytes = b"w" * 32
    script: Script = forced_or_counting
    tokens_per_step: int = 1
    replicas_ready: int = 1
    refusal: TrivetError | None = None
    fail_after: int | None = None
    failure: TrivetError = field(default_factory=lambda: TrivetError(ErrorKind.INTERNAL, "the worker failed"))
    # While clear, requests are taken and nothing is generated.
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    # Tokens after which a request waits for `flowing` again.
    pause_after: int | None = None
    adds: list[engine_pb2.Add] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    abort_reasons: list[int] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    live: dict[int, Child] = field(default_factory=dict)
    outboxes: list[Outbox] = field(default_factory=list)
    draining: bool = False
    # What a session is told whose name another process has taken, when `kill` ends it.
    name_taken: str = ""
    # A process that hangs: the connection stands and nothing comes.
    silent: bool = False
    last_step_age_ms: int | None = None
    hellos: list[types_pb2.Hello] = field(default_factory=list)
    prefixes: set[bytes] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    kill: asyncio.Event = field(default_factory=asyncio.Event)

    async def Session(self, request_iterator, context):
        outbox: Outbox = asyncio.Queue()
        first = await anext(aiter(request_iterator))
        self.hellos.append(first.hello)
        welcome = engine_pb2.Welcome(
            epoch=types_pb2.Epoch(instance=b"e" * 16, counter=len(self.hellos)),
            scheduler=types_pb2.Hello(name=self.name, instance=self.instance, schema=SCHEMA),
        )
        outbox.put_nowait(engine_pb2.SessionResponse(welcome=welcome))
        outbox.put_nowait(engine_pb2.SessionResponse(model=engine_pb2.Model(card=self.card())))
        self.outboxes.append(outbox)
        tasks = [
            asyncio.create_task(self._read(request_iterator, outbox)),
            asyncio.create_task(self._report(outbox)),
            asyncio.create_task(self._die(outbox)),
        ]
        try:
            while (message := await outbox.get()) is not None:
                if not self.silent:
                    yield message
            if self.name_taken:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, self.name_taken)
        finally:
            for task in tasks:
                task.cancel()
            self.outboxes.remove(outbox)
            for handle in [handle for handle, child in self.live.items() if child.outbox is outbox]:
                self.live.pop(handle).task.cancel()
            self.changed.set()

    async def GetModelBundle(self, request, context):
        for start in range(0, len(self.bundle), CHUNK_BYTES):
            chunk = types_pb2.Chunk(data=self.bundle[start : start + CHUNK_BYTES], offset=start, total=len(self.bundle))
            yield engine_pb2.GetModelBundleResponse(chunk=chunk)

    def card(self) -> types_pb2.ModelCard:
        return types_pb2.ModelCard(
            name="SmolLM2-135M-Instruct",
            vocab_size=VOCAB_SIZE,
            max_model_len=CONTEXT,
            eos_token_ids=pack_i32([EOS]),
            fingerprint=types_pb2.Fingerprint(weights=self.weights, dtype="float32"),
            tasks=[types_pb2.TASK_GENERATE],
            max_logprobs=20,
            bundle_sha256=self.digest,
            block_size=16,
        )

    def fail(self, handle: int) -> None:
        """Let one running child fail now."""
        child = self.live.pop(handle)
        child.task.cancel()
        self._fail(handle, self.failure, child.outbox)

    def drain(self) -> None:
        """Tell every frontend that this scheduler leaves, and take nothing new."""
        self.draining = True
        self.refusal = TrivetError(ErrorKind.UNAVAILABLE, "this scheduler is shutting down")
        self.say(engine_pb2.SessionResponse(draining=types_pb2.Draining(deadline_ms=1000, reason="leaving")))

    def say(self, message: engine_pb2.SessionResponse) -> None:
        """Send a message of a test's own to every frontend."""
        for outbox in self.outboxes:
            outbox.put_nowait(message)

    async def until(self, condition: Callable[[], bool], *, seconds: float = 5.0) -> None:
        """Return when `condition` holds; it is looked at whenever something came up."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _die(self, outbox: Outbox) -> None:
        await self.kill.wait()
        outbox.put_nowait(None)

    async def _report(self, outbox: Outbox) -> None:
        while True:
            load = engine_pb2.Load(
                requests_running=len(self.live),
                replicas_ready=self.replicas_ready,
                kv_cache_usage=0.25,
                prefix_cache_hits_total=7,
                last_step_age_ms=self.last_step_age_ms,
            )
            outbox.put_nowait(engine_pb2.SessionResponse(load=load))
            await asyncio.sleep(0.1)

    async def _read(self, requests, outbox: Outbox) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "add":
                self._add(request.add, outbox)
            elif kind == "abort":
                for handle in unpack_u32(request.abort.handles).tolist():
                    self.aborted.append(handle)
                    self.abort_reasons.append(request.abort.reason)
                    self._end(handle, types_pb2.FINISH_REASON_ABORT)
            elif kind == "stop":
                for handle, count in zip(unpack_u32(request.stop.handles).tolist(), unpack_i32(request.stop.counts).tolist(), strict=True):
                    self.stopped.append((handle, count))
                    self._end(handle, types_pb2.FINISH_REASON_STOP)
            self.changed.set()

    def _end(self, handle: int, finish: int) -> None:
        """End a child that runs: its one finish still goes out."""
        child = self.live.pop(handle, None)
        if child is not None:
            child.task.cancel()
            child.outbox.put_nowait(engine_pb2.SessionResponse(outputs=row_of(handle, [], finish)))

    def _add(self, add: engine_pb2.Add, outbox: Outbox) -> None:
        self.adds.append(add)
        for index, handle in enumerate(unpack_u32(add.handles).tolist()):
            if add.resume and add.resume[index].done:
                continue
            task = asyncio.create_task(self._generate(add, index, handle, outbox))
            self.live[handle] = Child(add, outbox, task)

    async def _generate(self, add: engine_pb2.Add, index: int, handle: int, outbox: Outbox) -> None:
        if self.refusal is not None:
            self._fail(handle, self.refusal, outbox)
            return
        await self.flowing.wait()
        tokens = self.script(add, index)
        if EOS in tokens and not add.sampling.ignore_eos:
            tokens = tokens[: tokens.index(EOS) + 1]
        tokens = tokens[: add.sampling.max_tokens]
        ended_by_eos = bool(tokens) and tokens[-1] == EOS and not add.sampling.ignore_eos
        resume = add.resume[index] if add.resume else engine_pb2.ResumeState()
        known = unpack_i32(resume.output_token_ids).tolist()
        assert tokens[: len(known)] == known
        tokens = tokens[len(known) :]
        steps = [tokens[start : start + self.tokens_per_step] for start in range(0, len(tokens), self.tokens_per_step)] or [[]]
        sent = 0
        for number, step in enumerate(steps):
            if self.fail_after is not None and sent >= self.fail_after:
                self._fail(handle, self.failure, outbox)
                return
            if self.pause_after is not None and sent >= self.pause_after:
                await asyncio.Event().wait()
            finish = 0
            if number == len(steps) - 1:
                finish = types_pb2.FINISH_REASON_STOP if ended_by_eos else types_pb2.FINISH_REASON_LENGTH
                self.live.pop(handle, None)
            outputs = self._outputs(add, handle, step, finish, first=number == 0, resume=resume)
            if finish and ended_by_eos:
                outputs.stop_token_ids = pack_i32([EOS])
            outbox.put_nowait(engine_pb2.SessionResponse(outputs=outputs))
            sent += len(step)
            self.changed.set()
            await asyncio.sleep(0)

    def _outputs(
        self, add: engine_pb2.Add, handle: int, step: list[int], finish: int, *, first: bool, resume: engine_pb2.ResumeState
    ) -> engine_pb2.StepOutputs:
        outputs = row_of(handle, step, finish)
        if first and not resume.cached_tokens_reported:
            outputs.first_rows = pack_i32([0])
            cached = 16 if add.prompt_token_ids in self.prefixes else 0
            self.prefixes.add(add.prompt_token_ids)
            outputs.cached_tokens = pack_i32([cached])
        if first and not resume.prompt_logprobs_reported and add.sampling.HasField("prompt_logprobs"):
            prompt = unpack_i32(add.prompt_token_ids).tolist()
            outputs.prompt_logprobs.append(
                engine_pb2.PromptLogprobs(handle=handle, first_position=1, logprobs=_logprobs(prompt[1:], add.sampling.prompt_logprobs))
            )
        if add.sampling.HasField("logprobs") and step:
            outputs.logprob_rows = pack_i32([0])
            outputs.logprobs.CopyFrom(_logprobs(step, add.sampling.logprobs))
        return outputs

    def _fail(self, handle: int, error: TrivetError, outbox: Outbox) -> None:
        self.live.pop(handle, None)
        outputs = row_of(handle, [], types_pb2.FINISH_REASON_ERROR)
        outputs.errors.append(engine_pb2.RowError(handle=handle, error=error.to_proto()))
        outbox.put_nowait(engine_pb2.SessionResponse(outputs=outputs))


def row_of(handle: int, tokens: list[int], finish: int = 0) -> engine_pb2.StepOutputs:
    """A step's outputs of one row."""
    return engine_pb2.StepOutputs(
        handles=pack_u32([handle]),
        token_counts=pack_i32([len(tokens)]),
        token_ids=pack_i32(tokens),
        finish_reasons=pack_u8([finish]),
    )


def _logprobs(tokens: list[int], top: int) -> types_pb2.Logprobs:
    entries = [[token, *((token + rival) % VOCAB_SIZE for rival in range(top))] for token in tokens]
    return types_pb2.Logprobs(
        counts=pack_i32([len(entry) for entry in entries]),
        token_ids=pack_i32(list(itertools.chain.from_iterable(entries))),
        values=pack_f32([value for _ in entries for value in [-0.5, *(-0.5 - rival for rival in range(top))]]),
        ranks=pack_i32([1] * len(entries)),
    )


@contextlib.asynccontextmanager
async def serving(scheduler: FakeScheduler) -> AsyncIterator[grpc.aio.Server]:
    """`scheduler` on its address."""
    sizes = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.aio.server(options=sizes)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(scheduler, server)
    server.add_insecure_port(scheduler.address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=0)


@pytest.fixture(scope="session")
def model_bundle() -> tuple[bytes, bytes]:
    """The default model's bundle and its digest."""
    bundle = bundle_of(open_checkpoint(resolve_model(None)))
    return bundle.to_bytes(), bundle.digest


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    # A socket's path has room for about 100 characters, which pytest's folders exceed.
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        yield Path(folder)


@pytest.fixture
def serve() -> Callable[[FakeScheduler], contextlib.AbstractAsyncContextManager[grpc.aio.Server]]:
    """Serves a fake scheduler; leaving the context is the end of its process."""
    return serving


@pytest.fixture
def new_scheduler(socket_folder: Path, model_bundle: tuple[bytes, bytes]) -> Callable[..., FakeScheduler]:
    """Makes a fake scheduler of a name, which is not served yet and lets tokens flow."""

    def make(name: str, **facts: object) -> FakeScheduler:
        usual = {"address": f"unix:{socket_folder}/{name}.sock", "instance": name.encode().ljust(16, b".")}
        fake = FakeScheduler(bundle=model_bundle[0], digest=model_bundle[1], name=name, **(usual | facts))
        fake.flowing.set()
        return fake

    return make


@pytest.fixture
async def scheduler(socket_folder: Path, model_bundle: tuple[bytes, bytes]) -> AsyncIterator[FakeScheduler]:
    """A fake scheduler that runs and lets tokens flow."""
    fake = FakeScheduler(address=f"unix:{socket_folder}/scheduler.sock", bundle=model_bundle[0], digest=model_bundle[1])
    fake.flowing.set()
    async with serving(fake):
        yield fake


@contextlib.asynccontextmanager
async def running_frontend(settings: FrontendSettings) -> AsyncIterator[Frontend]:
    """A frontend of this process that is ready."""
    frontend = Frontend(settings, clock=SystemClock())
    await frontend.start()
    following = asyncio.create_task(frontend.follow_engine())
    try:
        async with asyncio.timeout(10):
            while not frontend.inference.ready:
                assert not following.done(), following.exception()
                await asyncio.sleep(0.01)
        yield frontend
    finally:
        await frontend.stop()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.fixture
def start_frontend(scheduler: FakeScheduler) -> Callable[..., contextlib.AbstractAsyncContextManager[Frontend]]:
    """Starts a frontend of the fake scheduler with the settings that a test gives."""

    def start(**settings: object) -> contextlib.AbstractAsyncContextManager[Frontend]:
        fixed = {"scheduler": (scheduler.address,), "port": 0, "grpc_listen": "127.0.0.1:0"}
        return running_frontend(FrontendSettings(**(fixed | settings)))

    return start


@pytest.fixture
async def frontend(start_frontend: Callable[..., contextlib.AbstractAsyncContextManager[Frontend]]) -> AsyncIterator[Frontend]:
    async with start_frontend() as frontend:
        yield frontend


@pytest.fixture
async def http(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontend.http_url, timeout=20) as client:
        yield client
