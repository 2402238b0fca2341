"""What sessions and attachments are for: requests run, end, and free what they held."""

from pathlib import Path

import grpc
import numpy as np
import pytest
from deployed import deployment
from model_worker import BLOCK
from played import BUNDLE, DIGEST, until
from trivet_proto.errors import ErrorKind
from trivet_proto.packing import pack_u32
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc, types_pb2
from trivet_scheduler.report import load_report


async def test_requests_and_children_run_to_their_end(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        prompt = list(range(2 * BLOCK + 1))
        frontend.add([1], prompt, 5)
        frontend.add([2, 3], prompt, 4)
        await frontend.until_finished(1, 2, 3)
        assert frontend.tokens == {1: [9, 10, 11, 12, 13], 2: [9, 10, 11, 12], 3: [9, 10, 11, 12]}
        assert set(frontend.finishes.values()) == {types_pb2.FINISH_REASON_LENGTH}
        assert frontend.cached[3] == 2 * BLOCK
        await until(lambda: load_report(deployed.engine).blocks_in_use == 0)
        assert frontend.card.kv_capacity_tokens == 39 * BLOCK


async def test_a_bad_request_is_answered_on_its_handle_and_others_go_on(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        frontend.add([1], [], 5)
        frontend.add([2], [1] * 60, 50)
        frontend.add([3], [5000], 5)
        frontend.add([4], [1], 2)
        frontend.add([5], [1], 2, uid=b"short")
        await frontend.until_finished(1, 2, 3, 4, 5)
        assert {handle: error.kind for handle, error in frontend.errors.items()} == dict.fromkeys(
            (1, 2, 3, 5), types_pb2.ERROR_KIND_INVALID_ARGUMENT
        )
        assert frontend.tokens[4] == [1, 2]


async def test_the_end_of_a_session_frees_what_it_held(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        engine = deployed.engine
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1], 20)
        await until(lambda: worker.num_held)
        frontend.call.cancel()
        await until(lambda: not engine.core.requests and not engine.num_sessions)
        worker.go.set()
        await until(lambda: load_report(engine).blocks_in_use == 0)


async def test_an_add_whose_uid_is_alive_replaces_the_older_one_without_a_word(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        worker.go.clear()
        frontend.add([1], [1, 2], 5, uid=b"u" * 16)
        await until(lambda: worker.num_held)
        frontend.add([2], [1, 2], 5, uid=b"u" * 16)
        await until(lambda: [request.handle for request in deployed.engine.core.requests] == [2])
        worker.go.set()
        await frontend.until_finished(2)
        assert frontend.tokens == {2: [2, 3, 4, 5, 6]}
        assert 1 not in frontend.finishes


async def test_two_live_requests_with_one_client_id_are_two_requests(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        worker, frontend = await deployed.worker(), await deployed.frontend()
        other = await deployed.frontend("other")
        worker.go.clear()
        frontend.add([1], [1, 2], 5, request_id="the same")
        frontend.add([2], [1, 2, 3], 5, request_id="the same")
        other.add([1], [1], 5, request_id="the same")
        await until(lambda: len(deployed.engine.core.requests) == 3)
        frontend.say(abort=engine_pb2.Abort(handles=pack_u32([1])))
        worker.go.set()
        await frontend.until_finished(1, 2)
        await other.until_finished(1)
        assert frontend.finishes == {1: types_pb2.FINISH_REASON_ABORT, 2: types_pb2.FINISH_REASON_LENGTH}
        assert frontend.tokens[2] == [3, 4, 5, 6, 7]
        assert other.tokens[1] == [1, 2, 3, 4, 5]
        frontend.add([3], [1], 1, request_id="the same")
        await frontend.until_finished(3)


async def test_a_stop_or_abort_of_a_handle_that_is_gone_is_ignored(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        await deployed.worker()
        frontend = await deployed.frontend()
        frontend.add([1], [1], 2)
        await frontend.until_finished(1)
        frontend.say(abort=engine_pb2.Abort(handles=pack_u32([1, 7])))
        frontend.say(stop=engine_pb2.Stop(handles=pack_u32([1, 7]), counts=bytes(8)))
        frontend.add([2], [1], 2)
        await frontend.until_finished(2)
        assert frontend.finishes[2] == types_pb2.FINISH_REASON_LENGTH
        assert not frontend.ended.is_set()


async def test_the_bundle_that_the_worker_brought_is_served(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        stub = engine_pb2_grpc.EngineServiceStub(deployed.channel)
        with pytest.raises(grpc.aio.AioRpcError) as early:
            await stub.GetModelCard(engine_pb2.GetModelCardRequest())
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE
        await deployed.worker()
        chunks = [message.chunk.data async for message in stub.GetModelBundle(engine_pb2.GetModelBundleRequest(sha256=DIGEST))]
        assert b"".join(chunks) == BUNDLE
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Profile(engine_pb2.ProfileRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert np.isclose((await stub.GetLoad(engine_pb2.GetLoadRequest())).load.kv_cache_usage, 0)


async def test_a_request_before_any_worker_is_refused_as_one_to_be_tried_again(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        frontend = await deployed.frontend()
        frontend.add([1], [1], 2)
        await frontend.until_finished(1)
        assert frontend.errors[1].kind == ErrorKind.UNAVAILABLE
        assert frontend.errors[1].retryable
