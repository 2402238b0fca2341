"""A service is killed and nothing brings it back: what clients are told, by when, and that the gateway lives on.

Restarts are off and there is no second scheduler or worker, so what runs cannot go on; a hand-over may be waited for only as long as the
setting says.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from trivet_chassis.rpc import create_channel, is_serving
from trivet_proto.v1 import inference_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

from tests.deployment import Deployment, deployed, eventually
from tests.gateway import Gateway, calling, refusal_of

WAIT_S = 2.0
"""What the services are told to wait for a lost one."""

VARIABLES = {"TRIVET_FRONTEND_HANDOVER_TIMEOUT": str(WAIT_S), "TRIVET_SCHEDULER_REPLICA_TIMEOUT": str(WAIT_S)}
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


async def events_of(gateway: Gateway, path: str, body: dict[str, Any], running: asyncio.Semaphore) -> list[str]:
    """The data of every event of a stream, to its end."""
    events = []
    async with gateway.client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                running.release()
    return events


async def whole_of(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    return await gateway.post("/v1/completions", body)


async def code_of(deployment: Deployment, running: asyncio.Semaphore) -> grpc.StatusCode:
    """How a stream over gRPC ends."""
    (socket,) = deployment.folder.rglob("frontend.sock")
    async with create_channel(f"unix:{socket}") as channel:
        params = inference_pb2.GenerationParams(max_tokens=4000, ignore_eos=True)
        call = InferenceServiceStub(channel).Complete(inference_pb2.CompleteRequest(text="Once upon a time", params=params))
        try:
            async for _ in call:
                running.release()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code()


@asynccontextmanager
async def without(service: str) -> AsyncIterator[tuple[Deployment, Gateway, dict[str, Any]]]:
    """A deployment in whose streams' midst `service` was killed; gives how each stream ended."""
    async with (
        deployed("--max-restarts", "0", "--num-kv-blocks", "1200", variables=VARIABLES) as deployment,
        calling(deployment.base_url) as gateway,
    ):
        running = asyncio.Semaphore(0)
        messages = [{"role": "user", "content": "Tell me a long story."}]
        streams = {
            "completion": asyncio.create_task(events_of(gateway, "/v1/completions", LONG, running)),
            "chat": asyncio.create_task(
                events_of(gateway, "/v1/chat/completions", {"messages": messages, "max_tokens": 4000, "ignore_eos": True}, running)
            ),
            "grpc": asyncio.create_task(code_of(deployment, running)),
            "whole": asyncio.create_task(whole_of(gateway, LONG)),
        }
        for _ in range(12):
            await running.acquire()
        deployment.process_of(service).kill()
        killed_at = time.monotonic()

        async def says_unready() -> bool:
            answer = await gateway.client.get("/health")
            return answer.status_code == 503

        await eventually(says_unready, within=5, what=f"health answers 503 after the {service} was killed")
        async with asyncio.timeout(WAIT_S + 10 - (time.monotonic() - killed_at)):
            ends = dict(zip(streams, await asyncio.gather(*streams.values()), strict=True))
        yield deployment, gateway, ends


@pytest.mark.parametrize("service", ["scheduler", "worker"])
async def test_a_killed_service_that_nothing_brings_back_is_noticed_and_told(service: str) -> None:
    async with without(service) as (deployment, gateway, ends):
        for kind in ("completion", "chat"):
            assert "[DONE]" not in ends[kind]
            error = json.loads(ends[kind][-1])["error"]
            assert error["code"] == "unavailable", error
        assert ends["grpc"] is grpc.StatusCode.UNAVAILABLE
        assert refusal_of(ends["whole"]).status == 503

        asked_at = time.monotonic()
        assert (await gateway.refusal("/v1/completions", LONG | {"max_tokens": 4})).status == 503
        assert time.monotonic() - asked_at < 5, "a new request hung"
        (socket,) = deployment.folder.rglob("frontend.sock")
        assert not await is_serving(f"unix:{socket}")
        assert await is_serving(f"unix:{socket}", service="live")
        assert (await gateway.client.get("/health/live")).status_code == 200
        assert deployment.process.returncode is None
