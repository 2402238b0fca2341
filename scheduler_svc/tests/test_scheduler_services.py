"""The scheduler's gRPC server between a frontend and a worker that are played here, over a Unix socket."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from model_worker import BLOCK
from trivet_chassis.clock import SystemClock
from trivet_chassis.rpc import create_channel, create_server
from trivet_proto.packing import pack_i32, pack_u32, unpack_i32, unpack_u8, unpack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from trivet_scheduler.config import SchedulerSettings
from trivet_scheduler.engine import Engine
from trivet_scheduler.kv.registry import default_registry
from trivet_scheduler.rpc.engine_service import EngineService
from trivet_scheduler.rpc.worker_service import WorkerService

BUNDLE = b"a bundle"
DIGEST = hashlib.sha256(BUNDLE).digest()
SOON_S = 10.0


def worker_hello(name: str = "replica", weights: bytes = b"w") -> worker_pb2.WorkerHello:
    spec = types_pb2.KvCacheSpec(block_size=BLOCK, num_heads=1, head_size=8, head_size_v=8, dtype="float32")
    spec.full_attention.SetInParent()
    card = types_pb2.ModelCard(name="m", vocab_size=1000, max_model_len=64, bundle_sha256=DIGEST, block_size=BLOCK)
    card.fingerprint.weights = weights
    rank = worker_pb2.RankResources(layers=[types_pb2.LayerKvSpec(layer="layer", spec=spec)], kv_bytes_available=1 << 20, num_kv_blocks=40)
    limits = worker_pb2.WorkerLimits(block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    hello = types_pb2.Hello(name=name, instance=bytes(16), schema=SCHEMA)
    return worker_pb2.WorkerHello(
        hello=hello, card=card, ranks=[rank], limits=limits, abilities=worker_pb2.WorkerAbilities(steps_in_flight=2)
    )


class PlayedWorker:
    """Attaches and answers steps: the token after n tokens is n."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.lengths: dict[int, int] = {}
        self.steps = 0

    async def run(self, *, dies_at_step: int | None = None) -> None:
        call = self.stub.Attach()
        await call.write(worker_pb2.AttachRequest(hello=worker_hello()))
        async for message in call:
            kind = message.WhichOneof("message")
            if kind == "configure":
                epoch = message.configure.epoch
                if message.configure.bundle_wanted:
                    await self.stub.PutBundle(iter([worker_pb2.PutBundleRequest(sha256=DIGEST, chunk=types_pb2.Chunk(data=BUNDLE))]))
                await call.write(worker_pb2.AttachRequest(ready=worker_pb2.Ready(epoch=epoch)))
            elif kind == "heartbeat":
                await call.write(worker_pb2.AttachRequest(heartbeat=types_pb2.Heartbeat()))
            elif kind == "step":
                self.steps += 1
                if message.step.step == dies_at_step:
                    call.cancel()
                    return
                await call.write(worker_pb2.AttachRequest(result=self.answer(message.step, epoch)))

    def answer(self, step: worker_pb2.Step, epoch: types_pb2.Epoch) -> worker_pb2.StepResult:
        rows = []
        for new in step.new_requests:
            self.lengths[new.handle] = len(new.token_ids) // 4
            rows.append((new.handle, new.num_computed_tokens + new.num_scheduled_tokens))
        known = step.known
        for handle, computed, count in zip(
            unpack_u32(known.handles).tolist(),
            unpack_i32(known.num_computed_tokens).tolist(),
            unpack_i32(known.num_scheduled_tokens).tolist(),
            strict=True,
        ):
            rows.append((handle, computed + count))
        counts, tokens = [], []
        for handle, end in rows:
            done = end == self.lengths[handle]
            counts.append(int(done))
            if done:
                tokens.append(self.lengths[handle])
                self.lengths[handle] += 1
        return worker_pb2.StepResult(
            epoch=epoch,
            step=step.step,
            status=worker_pb2.STEP_STATUS_DONE,
            handles=pack_u32([handle for handle, _ in rows]),
            token_counts=pack_i32(counts),
            token_ids=pack_i32(tokens),
        )


class PlayedFrontend:
    """One session; keeps what came by handle."""

    def __init__(self, channel: grpc.aio.Channel, name: str = "frontend") -> None:
        self.call = engine_pb2_grpc.EngineServiceStub(channel).Session()
        self.name = name
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, types_pb2.Error] = {}
        self.card: types_pb2.ModelCard | None = None

    async def open(self) -> None:
        hello = types_pb2.Hello(name=self.name, instance=bytes(16), schema=SCHEMA)
        await self.call.write(engine_pb2.SessionRequest(hello=hello))
        while self.card is None:
            await self.read()

    async def add(self, handles: list[int], prompt: list[int], max_tokens: int) -> None:
        add = engine_pb2.Add(
            handles=pack_u32(handles),
            uid=handles[0].to_bytes(16, "big"),
            prompt_token_ids=pack_i32(prompt),
            sampling=types_pb2.SamplingParams(max_tokens=max_tokens),
            seed=1,
        )
        await self.call.write(engine_pb2.SessionRequest(add=add))

    async def read(self) -> None:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        if message.HasField("model"):
            self.card = message.model.card
        if not message.HasField("outputs"):
            return
        outputs = message.outputs
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
        async with asyncio.timeout(SOON_S):
            while not set(handles) <= set(self.finishes):
                await self.read()


@asynccontextmanager
async def scheduler(tmp_path: Path) -> AsyncIterator[tuple[Engine, str]]:
    address = f"unix:{tmp_path / 's.sock'}"
    engine = Engine(SchedulerSettings(listen=address), SystemClock())

    def register(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineService(engine, "s"), server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(engine, default_registry(), "s"), server)

    server = await create_server(address, register=register, services=())
    await server.start()
    try:
        yield engine, address
    finally:
        await server.stop(0)


@asynccontextmanager
async def deployment(tmp_path: Path, *, dies_at_step: int | None = None) -> AsyncIterator[tuple[Engine, grpc.aio.Channel, PlayedFrontend]]:
    async with scheduler(tmp_path) as (engine, address), create_channel(address) as channel:
        worker = asyncio.create_task(PlayedWorker(channel).run(dies_at_step=dies_at_step))
        frontend = PlayedFrontend(channel)
        async with asyncio.timeout(SOON_S):
            await frontend.open()
        yield engine, channel, frontend
        frontend.call.cancel()
        worker.cancel()
        await asyncio.wait([worker])


async def until(condition: object) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_and_children_run_to_their_end(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (engine, _, frontend):
        prompt = list(range(2 * BLOCK + 1))
        await frontend.add([1], prompt, 5)
        await frontend.add([2, 3], prompt, 4)
        await frontend.until_finished(1, 2, 3)
        assert frontend.tokens == {1: [9, 10, 11, 12, 13], 2: [9, 10, 11, 12], 3: [9, 10, 11, 12]}
        assert set(frontend.finishes.values()) == {types_pb2.FINISH_REASON_LENGTH}
        assert frontend.cached[3] == 2 * BLOCK
        await until(lambda: engine.load().blocks_in_use == 0)
        assert frontend.card.kv_capacity_tokens == 39 * BLOCK


async def test_a_bad_request_is_answered_on_its_handle_and_others_go_on(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (_, _, frontend):
        await frontend.add([1], [], 5)
        await frontend.add([2], [1] * 60, 50)
        await frontend.add([3], [5000], 5)
        await frontend.add([4], [1], 2)
        await frontend.until_finished(1, 2, 3, 4)
        assert {handle: error.kind for handle, error in frontend.errors.items()} == dict.fromkeys(
            (1, 2, 3), types_pb2.ERROR_KIND_INVALID_ARGUMENT
        )
        assert frontend.tokens[4] == [1, 2]


async def test_a_handle_used_twice_ends_the_session_and_its_requests(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (engine, channel, frontend):
        other = PlayedFrontend(channel, "other")
        await other.open()
        await frontend.add([1], [1], 2)
        await frontend.add([1], [1], 2)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await frontend.until_finished(99)
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other.add([1], [1], 2)
        await other.until_finished(1)
        await until(lambda: not engine.core.requests)
        other.call.cancel()


async def test_the_end_of_a_session_frees_what_it_held(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (engine, _, frontend):
        engine.core.paused = True
        await frontend.add([1], [1], 2)
        await until(lambda: engine.core.requests)
        frontend.call.cancel()
        await until(lambda: not engine.core.requests and not engine.num_sessions)
        assert engine.load().blocks_in_use == 0


async def test_requests_go_on_with_the_next_worker_when_theirs_is_lost(tmp_path: Path) -> None:
    async with deployment(tmp_path, dies_at_step=4) as (engine, channel, frontend):
        await frontend.add([1], [1, 2, 3], 20)
        await until(lambda: engine.num_replicas == 0)
        heir = asyncio.create_task(PlayedWorker(channel).run())
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 23))
        heir.cancel()
        await asyncio.wait([heir])


async def test_a_worker_of_another_model_is_refused_with_both_named(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (engine, channel, frontend):
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
        await call.write(worker_pb2.AttachRequest(hello=worker_hello("stranger", b"other")))
        with pytest.raises(grpc.aio.AioRpcError, match="stranger serves another model than replica"):
            await call.read()
        await frontend.add([1], [1], 2)
        await frontend.until_finished(1)
        assert engine.num_replicas == 1


async def test_the_bundle_that_the_worker_brought_is_served(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (_, channel, _):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        chunks = [message.chunk.data async for message in stub.GetModelBundle(engine_pb2.GetModelBundleRequest(sha256=DIGEST))]
        assert b"".join(chunks) == BUNDLE
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Sleep(engine_pb2.SleepRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert np.isclose((await stub.GetLoad(engine_pb2.GetLoadRequest())).load.kv_cache_usage, 0)
