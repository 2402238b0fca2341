"""What a frontend that breaks the contract sees, and that nobody else notices: a running request of another ends as it should."""

from collections.abc import Callable
from pathlib import Path

from deployed import running_request
from played import CONTEXT, an_add, until
from trivet_proto.errors import ErrorKind
from trivet_proto.packing import pack_f32, pack_i32
from trivet_proto.v1 import engine_pb2, types_pb2


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
