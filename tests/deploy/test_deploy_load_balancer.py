"""The load balancer follows the frontends there are, holds no stream back, and says well that nobody is there."""

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from trivet_chassis.rpc import create_channel

from tests.deploy.load_balancer import CONFIGURATION, WITHIN, before_stand_ins, haproxy
from tests.deploy.test_deploy_observability import LOAD_BALANCER
from tests.deployment import eventually

SECOND, THIRD = "127.0.0.2", "127.0.0.3"


def test_haproxy_takes_its_configuration_without_a_warning() -> None:
    binary, environment = haproxy()
    answer = subprocess.run(
        [binary, "-c", "-f", str(CONFIGURATION)], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "WARNING" not in answer.stderr, answer.stderr


async def test_frontends_that_come_get_requests_and_those_that_drain_get_no_more(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND) as (balancer, frontends):
        await balancer.until_ready()
        assert await balancer.who_answers() == {SECOND}
        balancer.names.addresses = [SECOND, THIRD]
        await balancer.until_answering(SECOND, THIRD)
        frontends[SECOND].ready = False
        await balancer.until_answering(THIRD)
        frontends[SECOND].ready = True
        await balancer.until_answering(SECOND, THIRD)
        balancer.names.addresses = [THIRD]
        await balancer.until_answering(THIRD)
        logged = [line for line in balancer.requests_logged() if line["path"] == "/who"]
        assert {"frontend-1", "frontend-2"} <= {line["replica"] for line in logged}
        assert {line["request_id"] for line in logged} == {"abc"}


async def test_a_stream_is_passed_on_piece_by_piece_and_outlives_the_drain_of_its_frontend(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND) as (balancer, frontends):
        await balancer.until_ready()
        async with balancer.http.stream("GET", "/stream") as response:
            pieces = response.aiter_text()
            # The first piece is here while the frontend holds the second one back.
            assert await asyncio.wait_for(anext(pieces), WITHIN) == "first"
            frontends[SECOND].ready = False

            async def out_of_turn() -> bool:
                return (await balancer.http.get(balancer.health)).status_code == 503

            await eventually(out_of_turn, within=WITHIN, what="the frontend gets no new requests")
            frontends[SECOND].next_piece.set()
            assert await asyncio.wait_for(anext(pieces), WITHIN) == "last"


async def test_what_a_leaving_frontend_refuses_is_served_by_another(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND, THIRD) as (balancer, frontends):
        await balancer.until_answering(SECOND, THIRD)
        frontends[SECOND].leaving = True  # and its health has not been asked since
        answers = [await balancer.http.post("/v1/completions", json={"prompt": "a" * 20000}) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.text for answer in answers} == {THIRD}


async def test_with_no_frontend_ready_callers_are_told_to_come_back(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path) as (balancer, _):
        answer = await balancer.http.get("/v1/models")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"
        assert (await balancer.http.get(balancer.health)).status_code == 503


async def test_calls_over_one_grpc_channel_go_to_every_frontend_and_stream(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND, THIRD) as (balancer, _), create_channel(balancer.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await balancer.until_answering(SECOND, THIRD)
        answered: set[str] = set()

        async def both_answered() -> bool:
            # Three calls a round: with two, strict turns could ask each frontend for the other's address for ever.
            for address in (SECOND, THIRD, SECOND):
                watch = stub.Watch(health_pb2.HealthCheckRequest(service=address))
                async for update in watch:
                    # Each knows the health of its own address alone.
                    if update.status == health_pb2.HealthCheckResponse.SERVING:
                        answered.add(address)
                    break
                watch.cancel()
            return answered == {SECOND, THIRD}

        await eventually(both_answered, within=WITHIN, what="both frontends have answered over one channel")

        async def checked_and_found_well() -> bool:
            page = (await balancer.http.get(balancer.metrics)).text
            checks = re.findall(r'haproxy_server_check_status\{proxy="grpc",server="frontend-[12]",state="L7OK"\} (\d)', page)
            return checks == ["1", "1"]

        # Both are in turn from the moment they are found; that they stay there takes a check that each passes.
        await eventually(checked_and_found_well, within=WITHIN, what="both frontends pass their checks")


async def test_a_grpc_stream_is_passed_on_message_by_message(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND) as (balancer, frontends), create_channel(balancer.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await balancer.until_ready()
        rpc = frontends[SECOND].rpc
        assert rpc is not None
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SECOND), wait_for_ready=True)
        assert (await asyncio.wait_for(watch.read(), WITHIN)).status == health_pb2.HealthCheckResponse.SERVING
        await rpc.health.servicer.set(SECOND, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await asyncio.wait_for(watch.read(), WITHIN)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_its_metrics_are_inside_and_no_replicas_metrics_outside(tmp_path: Path) -> None:
    async with before_stand_ins(tmp_path, SECOND) as (balancer, _):
        await balancer.until_ready()
        assert (await balancer.http.get("/metrics")).status_code == 404
        page = (await balancer.http.get(balancer.metrics)).text
        assert 'haproxy_backend_active_servers{proxy="http"}' in page
        assert all(name in page for name in LOAD_BALANCER)
