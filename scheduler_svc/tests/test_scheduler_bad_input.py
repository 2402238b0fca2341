"""What a peer that breaks the contract sees, and that nobody else notices: a running request of another frontend ends as it should."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from played import CONTEXT, DIGEST, Deployment, PlayedWorker, an_add, deployment, end_of, until, worker_hello
from trivet_chassis.rpc import create_channel
from trivet_proto.errors import ErrorKind
from trivet_proto.limits import MAX_MESSAGE_BYTES, MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_f32, pack_i32, pack_u32
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import engine_pb2, types_pb2, worker_pb2, worker_pb2_grpc

ATTACH, SESSION = "/trivet.v1.WorkerService/Attach", "/trivet.v1.EngineService/Session"


@asynccontextmanager
async def running_request(tmp_path: Path) -> AsyncIterator[tuple[Deployment, grpc.aio.Channel]]:
    """A request in the middle of its run, which ends with all its tokens afterwards, and a channel for the offender."""
    async with deployment(tmp_path) as deployed, create_channel(deployed.address) as channel:
        worker, frontend = await deployed.worker("good worker"), await deployed.frontend("good frontend")
        worker.go.clear()
        frontend.add([1], [1, 2, 3], 20)
        await until(lambda: worker.num_held)
        yield deployed, channel
        worker.go.set()
        await frontend.until_finished(1)
        assert frontend.tokens[1] == list(range(3, 23))
        assert not frontend.ended.is_set()
        assert not worker.ended.is_set()


def raw_stream(channel: grpc.aio.Channel, method: str) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    return channel.stream_stream(method)()


def session_hello(name: str = "offender") -> engine_pb2.SessionRequest:
    return engine_pb2.SessionRequest(hello=types_pb2.Hello(name=name, instance=bytes(16), schema=SCHEMA))


# ---- workers ----


async def test_a_worker_of_another_model_is_refused_with_both_named(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (deployed, channel):
        stranger = deployed.play(PlayedWorker(channel, hello=worker_hello("stranger", b"other")))
        await until(stranger.ended.is_set)
        assert stranger.error.kind is ErrorKind.FAILED_PRECONDITION
        assert "stranger serves another model than good worker" in stranger.error.message
        assert deployed.engine.num_replicas == 1


async def test_of_two_models_that_come_together_the_second_that_is_ready_is_refused(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        calls = []
        for name, weights in (("one", b"1"), ("two", b"2")):
            call = worker_pb2_grpc.WorkerServiceStub(deployed.channel).Attach()
            hello = worker_hello(name, weights)
            hello.card.bundle_sha256 = b""
            await call.write(worker_pb2.AttachRequest(hello=hello))
            calls.append((call, (await call.read()).configure.epoch))
        for call, epoch in calls:
            await call.write(worker_pb2.AttachRequest(ready=worker_pb2.Ready(epoch=epoch)))
            await until(lambda: deployed.engine.num_replicas)
        error = await end_of(calls[1][0])
        assert error.kind is ErrorKind.FAILED_PRECONDITION
        assert "one" in error.message
        assert "two" in error.message
        calls[0][0].cancel()


def no_name(hello: worker_pb2.WorkerHello) -> None:
    hello.hello.name = ""


def line_break(hello: worker_pb2.WorkerHello) -> None:
    hello.hello.name = "one\nline"


def old_contract(hello: worker_pb2.WorkerHello) -> None:
    hello.hello.schema.revision = 0


def no_ranks(hello: worker_pb2.WorkerHello) -> None:
    del hello.ranks[:]


def no_layers(hello: worker_pb2.WorkerHello) -> None:
    del hello.ranks[0].layers[:]


def blocks_of_nothing(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].layers[0].spec.block_size = hello.limits.block_size = 0


def heads_of_nothing(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].layers[0].spec.num_heads = 0


def more_blocks_than_memory(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].num_kv_blocks = 1 << 31


def blocks_without_end(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].ClearField("num_kv_blocks")
    hello.ranks[0].kv_bytes_available = (1 << 64) - 1


def no_sequences(hello: worker_pb2.WorkerHello) -> None:
    hello.limits.max_num_seqs = 0


def unknown_dtype(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].layers[0].spec.dtype = "decimal"


def half_an_end_token(hello: worker_pb2.WorkerHello) -> None:
    hello.card.eos_token_ids = b"abc"


def unknown_kind(hello: worker_pb2.WorkerHello) -> None:
    hello.ranks[0].layers[0].spec.ClearField("full_attention")


SENSELESS = (
    no_name,
    line_break,
    old_contract,
    no_ranks,
    no_layers,
    blocks_of_nothing,
    heads_of_nothing,
    more_blocks_than_memory,
    blocks_without_end,
    no_sequences,
    unknown_dtype,
    half_an_end_token,
    unknown_kind,
)


async def test_a_worker_that_says_what_makes_no_sense_is_refused_by_name(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (deployed, channel):
        for spoil in SENSELESS:
            hello = worker_hello("offender")
            spoil(hello)
            offender = deployed.play(PlayedWorker(channel, hello=hello))
            await until(offender.ended.is_set)
            assert offender.error is not None, spoil.__name__
            assert offender.error.kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.FAILED_PRECONDITION), (spoil.__name__, offender.error)
        assert deployed.engine.num_replicas == 1


def unknown_step(result: worker_pb2.StepResult) -> None:
    result.step += 7


def strange_handles(result: worker_pb2.StepResult) -> None:
    result.handles = pack_u32([4_000_000_000])


def too_few_tokens(result: worker_pb2.StepResult) -> None:
    result.token_ids = b""


def half_a_token(result: worker_pb2.StepResult) -> None:
    result.token_ids = b"abc"


def token_beyond_the_vocabulary(result: worker_pb2.StepResult) -> None:
    result.token_ids = pack_i32([1000])


def negative_token(result: worker_pb2.StepResult) -> None:
    result.token_ids = pack_i32([-1])


def two_tokens(result: worker_pb2.StepResult) -> None:
    result.token_counts, result.token_ids = pack_i32([2]), pack_i32([1, 2])


def no_tokens(result: worker_pb2.StepResult) -> None:
    result.token_counts, result.token_ids = pack_i32([0]), b""


def no_status(result: worker_pb2.StepResult) -> None:
    result.status = worker_pb2.STEP_STATUS_UNSPECIFIED


def skipped_without_a_failure(result: worker_pb2.StepResult) -> None:
    result.status = worker_pb2.STEP_STATUS_SKIPPED


def flags_of_others(result: worker_pb2.StepResult) -> None:
    result.flags = b"\0\0\0"


def logprobs_without_tokens(result: worker_pb2.StepResult) -> None:
    result.logprob_rows = pack_i32([0])
    result.logprobs.counts, result.logprobs.ranks = pack_i32([2]), pack_i32([1])


def logprobs_of_another_row(result: worker_pb2.StepResult) -> None:
    result.logprob_rows = pack_i32([5])
    result.logprobs.SetInParent()


def logprobs_that_are_no_numbers(result: worker_pb2.StepResult) -> None:
    result.logprob_rows = pack_i32([0])
    result.logprobs.counts, result.logprobs.token_ids = pack_i32([1]), pack_i32([1])
    result.logprobs.values, result.logprobs.ranks = pack_f32([float("nan")]), pack_i32([1])


def prompt_logprobs_of_a_stranger(result: worker_pb2.StepResult) -> None:
    result.prompt_logprobs.add(handle=9, first_position=1)


def prompt_logprobs_beyond_the_prompt(result: worker_pb2.StepResult) -> None:
    logprobs = types_pb2.Logprobs(counts=pack_i32([1]), token_ids=pack_i32([1]), values=pack_f32([-1]), ranks=pack_i32([1]))
    result.prompt_logprobs.add(handle=1, first_position=50, logprobs=logprobs)


def second_part_first(result: worker_pb2.StepResult) -> None:
    result.part.index, result.part.count = 1, 2


def part_beyond_its_count(result: worker_pb2.StepResult) -> None:
    result.part.index, result.part.count = 0, 0


BROKEN = (
    unknown_step,
    strange_handles,
    too_few_tokens,
    half_a_token,
    token_beyond_the_vocabulary,
    negative_token,
    two_tokens,
    no_tokens,
    no_status,
    skipped_without_a_failure,
    flags_of_others,
    logprobs_without_tokens,
    logprobs_of_another_row,
    logprobs_that_are_no_numbers,
    prompt_logprobs_of_a_stranger,
    prompt_logprobs_beyond_the_prompt,
    second_part_first,
    part_beyond_its_count,
)


async def test_a_worker_whose_result_does_not_fit_its_step_is_lost_and_its_request_goes_on_elsewhere(tmp_path: Path) -> None:
    async with deployment(tmp_path) as deployed:
        frontend = await deployed.frontend()
        for number, spoil in enumerate(BROKEN, start=1):
            offender = await deployed.worker("offender")
            await until(lambda: frontend.card is not None)
            offender.spoil = spoil
            frontend.add([number], [1, 2, 3], 6)
            await until(offender.ended.is_set)
            assert offender.error is not None, spoil.__name__
            assert offender.error.kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.ABORTED), (spoil.__name__, offender.error)
            assert deployed.engine.num_replicas == 0
            heir = await deployed.worker("heir")
            await frontend.until_finished(number)
            assert frontend.tokens[number] == [3, 4, 5, 6, 7, 8], spoil.__name__
            heir.call.cancel()
            await until(lambda: deployed.engine.num_replicas == 0)


async def test_bytes_that_are_no_message_end_their_stream_alone(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        name_that_is_no_text = b"\x0a\x08\x0a\x06\x0a\x04\xff\xfe\xff\xfe"
        for method, hello in (
            (ATTACH, worker_pb2.AttachRequest(hello=worker_hello("offender"))),
            (SESSION, session_hello()),
        ):
            for garbage in (b"\xff\xff\xff garbage", name_that_is_no_text):
                first = raw_stream(channel, method)
                await first.write(garbage)
                assert (await end_of(first)).kind is ErrorKind.INVALID_ARGUMENT
                later = raw_stream(channel, method)
                await later.write(hello.SerializeToString())
                await later.read()
                await later.write(garbage)
                assert (await end_of(later)).kind is ErrorKind.INVALID_ARGUMENT


async def test_a_message_too_large_ends_its_stream_alone(tmp_path: Path) -> None:
    unbounded = [("grpc.max_send_message_length", -1)]
    async with running_request(tmp_path) as (deployed, _), grpc.aio.insecure_channel(deployed.address, options=unbounded) as channel:
        for size in (MAX_STREAM_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES + 1):
            for method, hello, message in (
                (
                    ATTACH,
                    worker_pb2.AttachRequest(hello=worker_hello("offender")),
                    worker_pb2.AttachRequest(reply=worker_pb2.Reply(result=bytes(size))),
                ),
                (SESSION, session_hello(), engine_pb2.SessionRequest(add=an_add([1], [1], 1, kv_transfer=bytes(size)))),
            ):
                call = raw_stream(channel, method)
                await call.write(hello.SerializeToString())
                await call.read()
                await call.write(message.SerializeToString())
                error = await end_of(call)
                assert error.kind is ErrorKind.TOO_LARGE, (size, method)
                assert error.message


async def test_a_stream_begins_with_a_hello_and_has_one(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        for method, hello, other in (
            (
                ATTACH,
                worker_pb2.AttachRequest(hello=worker_hello("offender")),
                worker_pb2.AttachRequest(heartbeat=types_pb2.Heartbeat()),
            ),
            (SESSION, session_hello(), engine_pb2.SessionRequest(heartbeat=types_pb2.Heartbeat())),
        ):
            early = raw_stream(channel, method)
            await early.write(other.SerializeToString())
            assert (await end_of(early)).kind is ErrorKind.INVALID_ARGUMENT
            twice = raw_stream(channel, method)
            await twice.write(hello.SerializeToString())
            await twice.read()
            await twice.write(hello.SerializeToString())
            assert (await end_of(twice)).kind is ErrorKind.INVALID_ARGUMENT
            nothing = raw_stream(channel, method)
            await nothing.done_writing()
            assert (await end_of(nothing)).kind is ErrorKind.INVALID_ARGUMENT


async def test_a_bundle_that_nobody_announced_does_not_push_out_one_that_is_needed(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (deployed, channel):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for digest in (b"", b"d" * 32):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.PutBundle(iter([worker_pb2.PutBundleRequest(sha256=digest, chunk=types_pb2.Chunk(data=b"x"))]))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await stub.PutBundle(iter([worker_pb2.PutBundleRequest(sha256=DIGEST, chunk=types_pb2.Chunk(data=b"x"))]))
        assert wrong.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert DIGEST in deployed.engine.bundles


# ---- frontends ----


def handle_used_twice() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([5], [1], 30))] * 2


def handle_that_does_not_rise() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([handle], [1], 30)) for handle in (5, 4)]


def handle_zero() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([0], [1], 30))]


def children_with_one_handle() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([5, 5], [1], 30))]


def no_handles() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([], [1], 30))]


def half_a_handle() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=b"abc"))]


def stop_with_half_a_handle() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(stop=engine_pb2.Stop(handles=b"abc"))]


def later_part_without_the_first() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([5], [1], 30, part=types_pb2.Part(index=1, count=2)))]


def part_skipped() -> list[engine_pb2.SessionRequest]:
    return [engine_pb2.SessionRequest(add=an_add([5], [1], 30, part=types_pb2.Part(index=index, count=3))) for index in (0, 2)]


def parts_of_two_prompts() -> list[engine_pb2.SessionRequest]:
    parts = [an_add([handle], [1], 30, part=types_pb2.Part(index=index, count=2)) for index, handle in enumerate((5, 6))]
    return [engine_pb2.SessionRequest(add=part) for part in parts]


def request_between_parts() -> list[engine_pb2.SessionRequest]:
    first = an_add([5], [1], 30, part=types_pb2.Part(index=0, count=2))
    return [engine_pb2.SessionRequest(add=add) for add in (first, an_add([6], [1], 30))]


MISUSES: tuple[Callable[[], list[engine_pb2.SessionRequest]], ...] = (
    handle_used_twice,
    handle_that_does_not_rise,
    handle_zero,
    children_with_one_handle,
    no_handles,
    half_a_handle,
    stop_with_half_a_handle,
    later_part_without_the_first,
    part_skipped,
    parts_of_two_prompts,
    request_between_parts,
)


async def test_a_frontend_that_breaks_the_contract_loses_its_session_and_what_it_asked_for(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (deployed, channel):
        for misuse in MISUSES:
            offender = await deployed.frontend("offender", channel)
            for message in misuse():
                offender.send(message)
            await until(offender.ended.is_set)
            assert offender.error is not None, misuse.__name__
            assert offender.error.kind is ErrorKind.INVALID_ARGUMENT, (misuse.__name__, offender.error)
        await until(lambda: len(deployed.engine.core.requests) == 1 and deployed.engine.num_sessions == 1)


async def test_a_name_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (_, channel):
        for name in ("", "a\nb", "n" * 129):
            call = raw_stream(channel, SESSION)
            await call.write(session_hello(name).SerializeToString())
            assert (await end_of(call)).kind is ErrorKind.INVALID_ARGUMENT
        call = raw_stream(channel, SESSION)
        hello = session_hello()
        hello.hello.schema.least_revision = 1000
        await call.write(hello.SerializeToString())
        assert (await end_of(call)).kind is ErrorKind.FAILED_PRECONDITION


SPOILED_SAMPLING: dict[str, dict[str, object]] = {
    "temperature": {"temperature": float("nan")},
    "top_p": {"top_p": 0.0},
    "min_p": {"min_p": 1.5},
    "presence_penalty": {"presence_penalty": float("inf")},
    "repetition_penalty": {"repetition_penalty": -1.0},
    "stop_token_ids": {"stop_token_ids": pack_i32([-1])},
    "allowed_token_ids": {"allowed_token_ids": pack_i32([1000])},
    "logit_bias": {"logit_bias_ids": pack_i32([1, 2]), "logit_bias_values": pack_f32([1.0])},
    "bad_words": {"bad_words_ids": pack_i32([1, 2]), "bad_words_counts": pack_i32([3])},
    "logprobs": {"logprobs": 6},
}


async def test_sampling_that_could_break_a_step_is_refused_on_its_own_handle(tmp_path: Path) -> None:
    async with running_request(tmp_path) as (deployed, channel):
        frontend = await deployed.frontend("offender", channel)
        for handle, (param, fields) in enumerate(SPOILED_SAMPLING.items(), start=1):
            add = an_add([handle], [1], 5)
            add.sampling.MergeFrom(types_pb2.SamplingParams(**fields))
            frontend.say(add=add)
            await frontend.until_finished(handle)
            assert frontend.errors[handle].kind == types_pb2.ERROR_KIND_INVALID_ARGUMENT
            assert frontend.errors[handle].param == param
        too_long = len(SPOILED_SAMPLING) + 1
        frontend.add([too_long], [1] * CONTEXT, 1)
        await frontend.until_finished(too_long)
        assert not frontend.ended.is_set()
