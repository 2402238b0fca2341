"""Workers sleep and wake under running requests: memory is given back meanwhile, and no token is other than without the sleep."""

import asyncio
from typing import Any

import grpc
import pytest
from trivet_chassis.rpc import create_channel
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc

from tests.deployment import Deployment, deployed, eventually
from tests.gateway import Gateway, calling, finish_of, text_of

BODY = {"prompt": "The old lighthouse keeper", "max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 7}
WEIGHTS = 300 << 20
"""Bytes; the default model's weights in float32 take 540 MB."""


def scheduler_address(deployment: Deployment) -> str:
    [path] = deployment.folder.rglob("scheduler.sock")
    return f"unix:{path}"


async def is_ready(gateway: Gateway) -> bool:
    return (await gateway.client.get("/health/ready")).status_code == 200


async def is_away(gateway: Gateway) -> bool:
    return not await is_ready(gateway)


async def story(gateway: Gateway, begun: asyncio.Event | None = None) -> tuple[str, str]:
    chunks: list[dict[str, Any]] = []
    async with gateway.streaming("/v1/completions", BODY) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if begun is not None and len(chunks) > 5:
                begun.set()
    return text_of(chunks), finish_of(chunks)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_a_stream_goes_on_after_a_sleep_with_the_tokens_that_it_would_have_had(level: int) -> None:
    async with (
        deployed("--num-kv-blocks", "200") as deployment,
        calling(deployment.base_url) as gateway,
        create_channel(scheduler_address(deployment)) as channel,
    ):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        expected = await story(gateway)
        begun = asyncio.Event()
        stream = asyncio.create_task(story(gateway, begun))
        await begun.wait()
        worker = deployment.process_of("worker")
        awake = worker.memory_info().rss
        await stub.Sleep(engine_pb2.SleepRequest(level=level))
        assert not stream.done()
        asleep = worker.memory_info().rss
        if level == 2:
            assert asleep < awake - WEIGHTS, f"{asleep >> 20} MiB asleep, {awake >> 20} awake"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Resume(engine_pb2.ResumeRequest())
        assert "asleep" in str(refused.value.details())
        await eventually(lambda: is_away(gateway), within=10, what="the gateway is not ready")
        assert (await gateway.post("/v1/completions", BODY)).status_code == 503
        await stub.WakeUp(engine_pb2.WakeUpRequest())
        assert await stream == expected
        await eventually(lambda: is_ready(gateway), within=10, what="the gateway is ready again")
        assert (await gateway.complete(BODY["prompt"], max_tokens=4))["usage"]["completion_tokens"] == 4


@pytest.mark.long
async def test_a_worker_that_comes_while_the_others_sleep_sleeps_too_and_wakes_with_them() -> None:
    async with (
        deployed("--num-kv-blocks", "200") as deployment,
        calling(deployment.base_url) as gateway,
        create_channel(scheduler_address(deployment)) as channel,
    ):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        await stub.Sleep(engine_pb2.SleepRequest(level=1))
        for level in (0, 3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Sleep(engine_pb2.SleepRequest(level=level))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        deployment.process_of("worker").kill()

        async def is_asleep() -> bool:
            return deployment.log().count("asleep") >= 2

        await eventually(is_asleep, within=60, what="the new worker sleeps")
        assert not await is_ready(gateway)
        await stub.WakeUp(engine_pb2.WakeUpRequest())
        await eventually(lambda: is_ready(gateway), within=10, what="the gateway is ready again")
        assert (await gateway.complete("Once", max_tokens=2))["usage"]["completion_tokens"] == 2
