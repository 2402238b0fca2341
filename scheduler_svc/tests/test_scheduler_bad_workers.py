"""What a worker that breaks the contract sees, and that nobody else notices: a running request ends as it should."""

from pathlib import Path

import grpc
import pytest
from deployed import deployment, running_request
from played import DIGEST, PlayedWorker, end_of, until, worker_hello
from trivet_proto.errors import ErrorKind
from trivet_proto.packing import pack_f32, pack_i32, pack_u32
from trivet_proto.v1 import types_pb2, worker_pb2, worker_pb2_grpc


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
