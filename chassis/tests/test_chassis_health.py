"""The three kinds of health: over gRPC live and ready, over HTTP the age of the last step."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trivet_chassis.progress import Progress
from trivet_chassis.rpc import LIVE, READY, RpcServer, create_channel, create_server, is_serving

SERVICE = "test.v1.Nothing"
READY_NAMES = (READY, "", SERVICE)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[RpcServer]:
    server = await create_server("127.0.0.1:0", register=lambda server: None, services=[SERVICE])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_a_started_server_lives_and_is_ready_when_the_service_says_so() -> None:
    async with running() as server:
        address = str(server.address)
        assert await is_serving(address, service=LIVE)
        for name in READY_NAMES:
            assert not await is_serving(address, service=name)
        await server.health.ready(True)
        assert server.health.is_ready
        for name in READY_NAMES:
            assert await is_serving(address, service=name)
        await server.health.ready(False)
        assert not server.health.is_ready
        for name in READY_NAMES:
            assert not await is_serving(address, service=name)
        assert await is_serving(address, service=LIVE)
        assert not await is_serving(address, service="other")
    for name in (LIVE, *READY_NAMES):
        assert not await is_serving(address, service=name)


async def test_a_watch_follows_readiness() -> None:
    async with running() as server, create_channel(str(server.address)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        for ready in (False, True, False):
            await server.health.ready(ready)
            expected = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await watch.read()).status == expected
        watch.cancel()


@pytest.mark.parametrize(
    ("busy", "age", "status", "body"),
    [
        (False, None, 200, b'{"busy": false, "last_step_age_ms": null}'),
        (True, None, 200, b'{"busy": true, "last_step_age_ms": null}'),
        (True, 1.5, 200, b'{"busy": true, "last_step_age_ms": 1500}'),
        (True, 10.5, 503, b'{"busy": true, "last_step_age_ms": 10500}'),
        (False, 99.0, 200, b'{"busy": false, "last_step_age_ms": 99000}'),
    ],
)
def test_only_work_whose_last_step_is_too_old_is_stuck(busy: bool, age: float | None, status: int, body: bytes) -> None:
    found = Progress(busy, age)
    assert (found.status, found.body) == (status, body)
