"""The metrics server: right answers to right requests, bounded and orderly answers to the rest."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families
from trivet_chassis import metrics
from trivet_chassis.metrics import MAX_HEAD_BYTES, MetricsServer, create_registry
from trivet_chassis.progress import Measure, idle
from trivet_proto.errors import ErrorKind, TrivetError


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def serving(
    listen: str = "127.0.0.1:0",
    registry: CollectorRegistry | None = None,
    *,
    ready: Callable[[], bool] = lambda: True,
    progress: Measure = idle,
    refresh: Callable[[], None] | None = None,
) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(listen, registry or CollectorRegistry(), ready=ready, progress=progress, step_limit_s=2.0, refresh=refresh)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def dial(server: MetricsServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert server.address is not None
    if server.address.is_unix:
        return await asyncio.open_unix_connection(server.address.path)
    return await asyncio.open_connection(server.address.host, server.address.port)


async def exchange(server: MetricsServer, request: bytes, *, eof: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer, read to the end of the connection."""
    reader, writer = await dial(server)
    writer.write(request)
    if eof:
        writer.write_eof()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, body = answer.split(b"\r\n\r\n", 1)
    first, *lines = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in lines), body


async def test_the_registry_is_served() -> None:
    registry = create_registry("worker")
    Counter("trivet_steps", "Steps", registry=registry).inc(3)
    async with serving(registry=registry) as server:
        status, headers, body = await exchange(server, get("/metrics?x=1"))
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert int(headers["Content-Length"]) == len(body)
    samples = {sample.name: sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples}
    assert samples["trivet_steps_total"].value == 3
    assert samples["trivet_build_info"].labels["service"] == "worker"
    assert {"process_open_fds", "process_resident_memory_bytes", "python_info"} <= set(samples)
    assert samples["trivet_tasks"].value >= 2  # this test and the connection


def test_a_registry_can_be_read_outside_a_loop() -> None:
    assert create_registry("worker").get_sample_value("trivet_tasks") == 0


async def test_a_scrape_refreshes_first() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("level", "Level", registry=registry)
    async with serving(registry=registry, refresh=lambda: gauge.set(7)) as server:
        assert b"level 7.0" in (await exchange(server, get("/metrics")))[2]


async def test_health_is_live_always_and_ready_when_the_service_says_so() -> None:
    ready = [False]
    async with serving(ready=lambda: ready[0]) as server:
        assert (await exchange(server, get("/health/live")))[0] == 200
        for path in ("/health", "/health/ready"):
            status, _, body = await exchange(server, get(path))
            assert (status, body) == (503, b"not ready\n")
        ready[0] = True
        for path in ("/health", "/health/ready"):
            assert (await exchange(server, get(path)))[0] == 200


async def test_progress_is_503_when_there_is_work_and_the_last_step_is_too_old() -> None:
    found: list[tuple[bool, float | None]] = [(True, 1.0)]
    async with serving(progress=lambda: found[0]) as server:
        status, headers, body = await exchange(server, get("/health/progress"))
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert body == b'{"busy": true, "last_step_age_ms": 1000}'
        found[0] = (True, 2.5)
        assert (await exchange(server, get("/health/progress")))[0] == 503
        assert (await exchange(server, get("/health/ready")))[0] == 200
    async with serving() as server:
        assert (await exchange(server, get("/health/progress")))[2] == b'{"busy": false, "last_step_age_ms": null}'


async def test_head_has_the_length_and_no_body() -> None:
    async with serving() as server:
        status, headers, body = await exchange(server, get("/health", "HEAD"))
    assert (status, headers["Content-Length"], body) == (200, "6", b"")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/nothing"), 404),
        (get("/metrics/"), 404),
        (get("/metrics", "POST"), 405),
        (get("/health", "DELETE"), 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET metrics HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", 431),
        (b"G" * (2 * MAX_HEAD_BYTES), 431),
    ],
)
async def test_wrong_requests_get_their_status(request_bytes: bytes, status: int) -> None:
    async with serving() as server:
        assert (await exchange(server, request_bytes))[0] == status
        assert (await exchange(server, get("/health/live")))[0] == 200


async def test_a_wrong_method_learns_the_right_ones_though_its_body_was_not_read() -> None:
    async with serving() as server:
        request = b"POST /metrics HTTP/1.1\r\nContent-Length: 40000\r\n\r\n" + b"x" * 40_000
        status, headers, _ = await exchange(server, request)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


async def test_a_request_cut_off_is_answered() -> None:
    async with serving() as server:
        assert (await exchange(server, b"GET /metrics HT", eof=True))[0] == 400


async def test_a_request_may_come_in_any_pieces() -> None:
    request = get("/health/live")
    async with serving() as server:
        for cut in range(1, len(request)):
            reader, writer = await dial(server)
            writer.write(request[:cut])
            await writer.drain()
            writer.write(request[cut:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def test_a_head_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "HEAD_TIMEOUT_S", 0.05)
    async with serving() as server:
        assert (await exchange(server, b"GET /met"))[0] == 408


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_CONNECTIONS", 2)
    async with serving() as server:
        idle = [await dial(server) for _ in range(2)]
        for _, writer in idle:
            writer.write(b"GET /")
            await writer.drain()
        assert (await exchange(server, get("/health/live")))[0] == 503
        for _, writer in idle:
            writer.close()


async def test_a_failing_collector_is_a_500_without_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("inner secret")

    async with serving(refresh=fail) as server:
        status, _, body = await exchange(server, get("/metrics"))
        assert status == 500
        assert b"secret" not in body
        assert (await exchange(server, get("/health")))[0] == 200
    assert "inner secret" in caplog.text


async def test_stopping_ends_idle_connections_and_frees_the_port() -> None:
    async with serving() as server:
        reader, writer = await dial(server)
        address = server.address
        async with asyncio.timeout(5):
            await server.stop()
            assert await reader.read() == b""
        writer.close()
    async with serving(str(address)) as again:
        assert (await exchange(again, get("/health")))[0] == 200


async def test_a_unix_socket_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "m"
    async with serving(f"unix:{path}") as server:
        assert (await exchange(server, get("/health")))[0] == 200
        with pytest.raises(TrivetError, match="another process listens"):
            await MetricsServer(f"unix:{path}", CollectorRegistry(), ready=lambda: True).start()
    assert not os.path.lexists(path)


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with serving() as server:
        with pytest.raises(TrivetError, match="metrics_listen: cannot listen on") as caught:
            await MetricsServer(str(server.address), CollectorRegistry(), ready=lambda: True).start()
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "metrics_listen")


async def test_no_address_serves_nothing() -> None:
    async with serving("") as server:
        assert server.address is None


def test_registries_are_independent() -> None:
    first, second = create_registry("a"), create_registry("b")
    Counter("trivet_x", "x", registry=first)
    Counter("trivet_x", "x", registry=second)
