"""However a stream ends, nothing of it is left: no task, no request, no block, no count."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
from deployed import Deployment, deployment
from played import SOON_S, an_add, end_of, until, worker_hello
from trivet_chassis.rpc import create_channel
from trivet_proto.errors import ErrorKind
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from trivet_scheduler.awake import Pulse
from trivet_scheduler.metrics import engine_registry
from trivet_scheduler.replicas.link import WorkerLink
from trivet_scheduler.report import load_report
from trivet_scheduler.request import Request
from trivet_scheduler.rpc.session import FrontendSession

TIMES = 200
PATIENT = Pulse(silence_s=60)  # nobody here beats
AT_ONCE = 50

KILLED = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from trivet_chassis.rpc import create_channel
from test_scheduler_streams import hold_attachment, hold_session

async def main() -> None:
    async with create_channel({address!r}) as channel:
        calls = await asyncio.gather(
            *(hold_session(channel, f"killed {{index}}") for index in range({half})),
            *(hold_attachment(channel, f"killed {{index}}") for index in range({half})),
        )
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

Held = TypeVar("Held")
Call = grpc.aio.StreamStreamCall


async def open_session(channel: grpc.aio.Channel, name: str, timeout_s: float | None = None) -> Call:
    """A session that has asked for something."""
    call = engine_pb2_grpc.EngineServiceStub(channel).Session(timeout=timeout_s)
    await call.write(engine_pb2.SessionRequest(hello=types_pb2.Hello(name=name, instance=bytes(16), schema=SCHEMA)))
    await call.write(engine_pb2.SessionRequest(add=an_add([1], [1, 2, 3], 40)))
    return call


async def hold_session(channel: grpc.aio.Channel, name: str) -> Call:
    """A session with a request under way and its first token read."""
    call = await open_session(channel, name)
    while not (message := await call.read()).HasField("outputs"):
        assert message is not grpc.aio.EOF
    return call


async def open_attachment(channel: grpc.aio.Channel, name: str, timeout_s: float | None = None) -> Call:
    """A worker that has said what it is."""
    call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(timeout=timeout_s)
    await call.write(worker_pb2.AttachRequest(hello=worker_hello(name)))
    return call


async def hold_attachment(channel: grpc.aio.Channel, name: str) -> Call:
    """A worker that was configured."""
    call = await open_attachment(channel, name)
    assert (await call.read()).HasField("configure")
    return call


async def outlive(opening: Awaitable[Call]) -> Call | None:
    """Opened, unless its deadline passed meanwhile."""
    try:
        return await opening
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return None


class Observed:
    """What must be as before."""

    def __init__(self, deployed: Deployment) -> None:
        self._deployed = deployed
        self._registry = engine_registry(deployed.engine, lambda: deployed.num_streams)

    def now(self) -> dict[str, float | None]:
        values = {name: self._registry.get_sample_value(name) for name in ("trivet_streams", "trivet_sessions", "trivet_replicas_ready")}
        load = load_report(self._deployed.engine)
        tasks = sum("session" in task.get_name() or "worker" in task.get_name() for task in asyncio.all_tasks())
        return values | {
            "requests": len(self._deployed.engine.core.requests),
            "blocks": load.blocks_in_use,
            "tasks of streams": tasks,
            "all tasks": self._registry.get_sample_value("trivet_tasks"),
        }


def states_alive() -> int:
    """Sessions, links and requests that are still held: by two bystanders, and gRPC's own loop may remember its last call."""
    gc.collect()
    # By type, not `isinstance`: other libraries' objects answer the latter with warnings.
    return sum(type(found) in (FrontendSession, WorkerLink, Request) for found in gc.get_objects())


@asynccontextmanager
async def unchanged(tmp_path: Path, pulse: Pulse = PATIENT) -> AsyncIterator[Deployment]:
    """A deployment with a worker and a frontend at rest, which must look the same within 3 s of whatever happened."""
    async with deployment(tmp_path, pulse) as deployed:
        hello = worker_hello("bystander")
        hello.ranks[0].num_kv_blocks, hello.limits.max_num_seqs, hello.limits.max_num_batched_tokens = 2000, 256, 2000
        worker, frontend = await deployed.worker(hello=hello), await deployed.frontend("bystander")
        observed = Observed(deployed)
        frontend.add([1], [1, 2, 3], 3)
        await frontend.until_finished(1)
        await until(lambda: load_report(deployed.engine).blocks_in_use == 0)
        before = observed.now()
        yield deployed
        async with asyncio.timeout(3):
            while observed.now() != before:
                await asyncio.sleep(0.01)
        await until(lambda: states_alive() <= 3)
        frontend.add([2], [1, 2, 3], 3)
        await frontend.until_finished(2)
        assert frontend.tokens[2] == [3, 4, 5]
        assert not worker.ended.is_set()


async def in_turns(hold: Callable[[int], Awaitable[Held]], end: Callable[[Held], Awaitable[None]]) -> None:
    for first in range(0, TIMES, AT_ONCE):
        calls = await asyncio.gather(*(hold(index) for index in range(first, first + AT_ONCE)))
        await asyncio.gather(*(end(call) for call in calls))


async def cancel(call: Call) -> None:
    call.cancel()


async def half_close(call: Call) -> None:
    await call.done_writing()
    async with asyncio.timeout(SOON_S):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await call.code() is grpc.StatusCode.OK


async def wait_for_deadline(call: Call | None) -> None:
    if call is not None:
        async with asyncio.timeout(SOON_S):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancelled_streams_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed, create_channel(deployed.address) as channel:
        await in_turns(lambda index: hold_session(channel, f"s{index}"), cancel)
        await in_turns(lambda index: hold_attachment(channel, f"w{index}"), cancel)


async def test_streams_that_are_closed_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed, create_channel(deployed.address) as channel:
        await in_turns(lambda index: hold_session(channel, f"s{index}"), half_close)
        await in_turns(lambda index: hold_attachment(channel, f"w{index}"), half_close)


async def test_streams_whose_deadline_passes_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed, create_channel(deployed.address) as channel:
        await in_turns(lambda index: outlive(open_session(channel, f"s{index}", 0.3)), wait_for_deadline)
        await in_turns(lambda index: outlive(open_attachment(channel, f"w{index}", 0.3)), wait_for_deadline)


async def test_streams_of_a_channel_that_is_closed_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed:
        for first in range(0, TIMES, AT_ONCE):
            async with create_channel(deployed.address) as channel:
                await asyncio.gather(*(hold_session(channel, f"s{first + index}") for index in range(AT_ONCE)))
                await asyncio.gather(*(hold_attachment(channel, f"w{first + index}") for index in range(AT_ONCE)))


async def test_streams_of_a_process_that_is_killed_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed:
        script = KILLED.format(tests=str(Path(__file__).parent), address=deployed.address, half=TIMES)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"open\n"
        assert deployed.num_streams == 2 * TIMES + 2
        process.kill()
        await process.wait()
        del process


async def test_streams_of_a_connection_that_is_reset_leave_nothing(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed:
        pairs: list[asyncio.StreamWriter] = []
        pumps: list[asyncio.Task[None]] = []

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind_reader, behind_writer = await asyncio.open_unix_connection(deployed.address.removeprefix("unix:"))
            pairs.extend((writer, behind_writer))
            pumps.extend((asyncio.create_task(pump(reader, behind_writer)), asyncio.create_task(pump(behind_reader, writer))))

        proxy = await asyncio.start_unix_server(accept, tmp_path / "proxy.sock")
        for first in range(0, TIMES, AT_ONCE):
            async with create_channel(f"unix:{tmp_path / 'proxy.sock'}") as channel:
                await asyncio.gather(*(hold_session(channel, f"s{first + index}") for index in range(AT_ONCE)))
                await asyncio.gather(*(hold_attachment(channel, f"w{first + index}") for index in range(AT_ONCE)))
                for writer in pairs:
                    writer.transport.abort()
                await until(lambda: deployed.num_streams == 2)
            pairs.clear()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        proxy.close()
        await proxy.wait_closed()


async def test_streams_that_are_dropped_without_a_word_end_for_their_silence(tmp_path: Path) -> None:
    async with unchanged(tmp_path, Pulse(beat_s=0.2, silence_s=1.0)) as deployed, create_channel(deployed.address) as channel:
        for _ in range(2):
            await asyncio.gather(*(hold_session(channel, f"s{index}") for index in range(TIMES // 2)))
            await asyncio.gather(*(hold_attachment(channel, f"w{index}") for index in range(TIMES // 2)))
            gc.collect()
            await until(lambda: deployed.num_streams == 2)


async def test_a_frontend_that_reads_nothing_ends_like_any_other(tmp_path: Path) -> None:
    async with unchanged(tmp_path) as deployed, create_channel(deployed.address) as channel:
        call = await hold_session(channel, "deaf")
        engine = deployed.engine
        huge = types_pb2.ModelCard(name="m" * 900_000)
        for _ in range(20):
            for session in engine.sessions:
                if session.name == "deaf":
                    session.take_model(huge)
        del session
        await asyncio.sleep(0)  # the first of them is on its way
        newer = await deployed.frontend("deaf")
        await until(lambda: len(deployed.frontends.streams) == 2)
        newer.add([1], [1], 2)
        await newer.until_finished(1)
        newer.call.cancel()
        assert (await end_of(call)).kind is ErrorKind.ABORTED
