"""One HTTP/1.1 request on a connection of its own. What arrives is stamped and kept, and read only after the run, in `stream`.

The loop's only work while a server is measured is a clock reading and a list's append for each piece.
"""

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trivet_proto.errors import invalid

END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address, and what stands before the body of each request to it."""

    host: str
    port: int
    head: str

    @classmethod
    def parse(cls, url: str, path: str, api_key: str, flag: str) -> "Target":
        """Raises `TrivetError` where the URL is none that can be measured."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 0
        if host is None or parts.scheme != "http" or parts.query or parts.fragment:
            raise invalid(f"{flag} {url}: a server's root is wanted, such as http://127.0.0.1:8000; TLS is not measured")
        root = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        head = (
            f"POST {root}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}Content-Type: application/json\r\nConnection: close\r\n"
        )
        return cls(host, port, head)

    def request(self, body: bytes) -> bytes:
        return f"{self.head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Exchange:
    """What came of one request; times are of `time.perf_counter`."""

    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str = ""  # of the connection; what the server says of faults is in the pieces


class _Connection(asyncio.Protocol):
    def __init__(self, exchange: Exchange) -> None:
        self._pieces = exchange.pieces
        self._tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self._tail = self._tail[-len(END) :] + data[-2 * len(END) :]
        if END in self._tail and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


async def exchange(target: Target, body: bytes, timeout_s: float, began: float | None = None) -> Exchange:
    """Send it and wait for its end. `began` is when it was due, where that was before now; a connection's fault is kept, not raised."""
    request = target.request(body)
    result = Exchange(time.perf_counter() if began is None else began)
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            transport, connection = await loop.create_connection(lambda: _Connection(result), target.host, target.port)
            try:
                transport.write(request)
                await connection.ended
            finally:
                transport.abort()
    except TimeoutError:
        result.fault = f"no end within {timeout_s:g} s"
    except OSError as error:
        result.fault = f"{type(error).__name__}: {error}"
    return result
