"""Small random models in Hugging Face folders, a driver that speaks to a runner as a scheduler would, and a scheduler that is dialled."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from trivet_chassis.clock import SystemClock
from trivet_chassis.resolving import Peers
from trivet_chassis.rpc import RpcServer, create_server
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, pack_u32, unpack_f32, unpack_i32
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from trivet_worker.config import WorkerSettings
from trivet_worker.link import SchedulerLink
from trivet_worker.link.home import Home
from trivet_worker.loading import LoadedModel, load_model
from trivet_worker.step_thread import StepThread

VOCABULARY = 96
DEADLINE_S = 20
BLOCK_SIZE = 4
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}


def write_llama(folder: Path, **changes: object):
    """A random Llama, or a Mistral where a window is given, saved by transformers; returns its own model of it."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, set_seed

    set_seed(0)
    config, kind = (MistralConfig, MistralForCausalLM) if "sliding_window" in changes else (LlamaConfig, LlamaForCausalLM)
    return save_random(kind(config(**{**CONFIG, **changes})), folder)


def save_random(model, folder: Path):
    """A model of transformers, with a tokenizer, as a checkpoint; returns it as it computes."""
    model = model.float().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)  # logits with margins
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def settings_for(folder: Path, **changes: object) -> WorkerSettings:
    base = WorkerSettings(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=256
    )
    return msgspec.structs.replace(base, **changes)


def cache_config(loaded: LoadedModel, num_blocks: int) -> types_pb2.KvCacheConfig:
    """What a scheduler would configure."""
    return types_pb2.KvCacheConfig(
        num_blocks=num_blocks,
        tensors=[
            types_pb2.KvCacheTensor(size_bytes=num_blocks * layer.spec.page_size_bytes, layers=[layer.layer], layout="layer_outermost")
            for layer in loaded.layers
        ],
        groups=[types_pb2.KvCacheGroup(layers=[layer.layer for layer in loaded.layers], spec=loaded.layers[0].spec)],
    )


class StepDriver:
    """Counts steps and hands out handles and blocks; decides nothing."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 64) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.runner.configure(cache_config(loaded, num_blocks))
        self.number = 0
        self._handle = 0
        self._block = 1

    def request(
        self,
        ids: Sequence[int],
        *,
        scheduled: int | None = None,
        prompt: int | None = None,
        room: int = 40,
        seed: int = 7,
        reported: int = 0,
        **sampling: object,
    ) -> worker_pb2.NewRequest:
        self._handle += 1
        count = -(-room // self.loaded.limits.block_size)
        blocks = np.arange(self._block, self._block + count)
        self._block += count
        return worker_pb2.NewRequest(
            handle=self._handle,
            token_ids=pack_i32(ids),
            num_prompt_tokens=len(ids) if prompt is None else prompt,
            sampling=types_pb2.SamplingParams(**sampling),
            seed=seed,
            block_ids=pack_i32(blocks),
            block_counts=pack_i32([count]),
            num_scheduled_tokens=len(ids) if scheduled is None else scheduled,
            prompt_logprobs_reported=reported,
        )

    def message(
        self,
        new: Sequence[worker_pb2.NewRequest] = (),
        known: Sequence[tuple[int, int, int]] = (),
        finished: Sequence[int] = (),
        **others: object,
    ) -> worker_pb2.Step:
        """`known` are (handle, computed, scheduled)."""
        self.number += 1
        step = worker_pb2.Step(step=self.number, new_requests=new, finished_handles=pack_u32(finished), **others)
        if known:
            handles, computed, scheduled = zip(*known, strict=True)
            step.known.handles, step.known.num_computed_tokens = pack_u32(handles), pack_i32(computed)
            step.known.num_scheduled_tokens, step.known.new_block_counts = pack_i32(scheduled), pack_i32([0] * len(known))
        return step

    def step(self, *arguments: object, **others: object) -> worker_pb2.StepResult:
        """One that must go well."""
        result = self.runner.execute(self.message(*arguments, **others))
        assert result.status == worker_pb2.STEP_STATUS_DONE, result
        return result

    def step_out_of_memory(self, *arguments: object, **others: object) -> worker_pb2.StepResult:
        """One that asks for more memory than there is, halfway through the layers: keys and values of the first are written by then."""
        last = self.runner._model.layers[-1]
        hook = last.register_forward_pre_hook(lambda *_: torch.empty(1 << 60))
        try:
            result = self.runner.execute(self.message(*arguments, **others))
        finally:
            hook.remove()
        assert result.status == worker_pb2.STEP_STATUS_FAILED, result
        return result

    def run(self, request: worker_pb2.NewRequest, tokens: int) -> list[int]:
        """Alone, prefill and decode, to so many tokens."""
        length = len(unpack_i32(request.token_ids))
        got = unpack_i32(self.step([request]).token_ids).tolist()
        for index in range(tokens - 1):
            got += unpack_i32(self.step(known=[(request.handle, length + index, 1)]).token_ids).tolist()
        self.step(finished=[request.handle])
        return got


def logit_rows(result: worker_pb2.StepResult) -> np.ndarray:
    """Whole rows of logits out of a result whose requests asked for all of them."""
    counts, ids = unpack_i32(result.logprobs.counts), unpack_i32(result.logprobs.token_ids)
    values, rows, first = unpack_f32(result.logprobs.values), [], 0
    for count in counts.tolist():
        row = np.empty(VOCABULARY, dtype=np.float32)
        row[ids[first : first + count]] = values[first : first + count]
        rows.append(row)
        first += count
    return np.array(rows)


class FakeScheduler(worker_pb2_grpc.WorkerServiceServicer):
    """Accepts anyone; the test decides what goes down each stream and reads what comes up."""

    def __init__(self, config: types_pb2.KvCacheConfig) -> None:
        self._config = config
        self.streams: asyncio.Queue[FakeStream] = asyncio.Queue()
        self.bundle = b""
        self.refusal: TrivetError | None = None
        self.refusals = 0
        self.server: RpcServer
        self._epochs = 0

    async def next_stream(self) -> "FakeStream":
        async with asyncio.timeout(DEADLINE_S):
            return await self.streams.get()

    async def Attach(self, requests, context):
        if self.refusal is not None:
            self.refusals += 1
            yield worker_pb2.AttachResponse(error=self.refusal.to_proto())
            return
        self._epochs += 1
        stream = FakeStream()
        hello = (await anext(requests)).hello
        reader = asyncio.create_task(stream.read(requests))
        epoch = types_pb2.Epoch(instance=b"s" * 16, counter=self._epochs)
        stream.hello, stream.epoch = hello, epoch
        yield worker_pb2.AttachResponse(
            configure=worker_pb2.Configure(epoch=epoch, ranks=[self._config], bundle_wanted=not self.bundle, steps_in_flight=2)
        )
        self.streams.put_nowait(stream)
        while (message := await stream.down.get()) is not None:
            yield message
        reader.cancel()

    async def PutBundle(self, requests, context):
        async for request in requests:
            assert request.chunk.offset == len(self.bundle)
            self.bundle += request.chunk.data
        return worker_pb2.PutBundleResponse(sha256=hashlib.sha256(self.bundle).digest())


class FakeStream:
    def __init__(self) -> None:
        self.hello = worker_pb2.WorkerHello()
        self.epoch = types_pb2.Epoch()
        self.up: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue()
        self.down: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()

    async def read(self, requests) -> None:
        async for message in requests:
            self.up.put_nowait(message)

    async def next(self, kind: str):
        """The next message of that kind; others are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self.up.get()
                if message.WhichOneof("message") == kind:
                    return getattr(message, kind)

    def send(self, step: worker_pb2.Step, epoch: types_pb2.Epoch | None = None) -> None:
        step.epoch.CopyFrom(self.epoch if epoch is None else epoch)
        self.down.put_nowait(worker_pb2.AttachResponse(step=step))


@asynccontextmanager
async def attached(driver, socket, folder):
    """A worker's link and the scheduler that it dials."""
    scheduler = FakeScheduler(cache_config(driver.loaded, 64))
    server = await create_server(
        f"unix:{socket}", register=lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(scheduler, server), services=()
    )
    await server.start()
    scheduler.server = server
    thread = StepThread()
    settings = settings_for(folder, scheduler=(f"unix:{socket}",), name="replica-a")
    clock = SystemClock()
    link = SchedulerLink(settings, driver.loaded, thread, clock, Home(Peers(settings.scheduler), clock, settings.rehome_after))
    task = asyncio.create_task(link.run())
    try:
        yield scheduler, link, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        thread.stop()
        await scheduler.server.stop(0)


@pytest.fixture
async def party(driver, tmp_path, llama_folder):
    """A scheduler, a worker's link that dials it, and the link's task."""
    async with attached(driver, tmp_path / "s.sock", llama_folder) as all_of_it:
        yield all_of_it


ALL_LOGITS = {"temperature": 0.0, "logprobs": VOCABULARY, "logprobs_mode": types_pb2.LOGPROBS_MODE_RAW_LOGITS}


@pytest.fixture
def load(llama_folder: Path) -> Callable[..., LoadedModel]:
    return lambda folder=llama_folder, **changes: load_model(settings_for(folder, **changes))


@pytest.fixture
def driver(load: Callable[..., LoadedModel]) -> StepDriver:
    return StepDriver(load())


@pytest.fixture(scope="session")
def tools():
    """This file's functions, for tests: pytest does not let them be imported."""

    class Tools:
        CONFIG, VOCABULARY, BLOCK_SIZE, ALL_LOGITS = CONFIG, VOCABULARY, BLOCK_SIZE, ALL_LOGITS
        StepDriver, FakeScheduler = StepDriver, FakeScheduler
        attached = staticmethod(attached)
        write_llama = staticmethod(write_llama)
        save_random = staticmethod(save_random)
        settings_for = staticmethod(settings_for)
        cache_config = staticmethod(cache_config)
        logit_rows = staticmethod(logit_rows)

    return Tools
