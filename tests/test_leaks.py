"""Nothing is left of requests that ended in whatever way: tasks, streams, blocks and open files return to what they were."""

import asyncio
import contextlib
import random

import grpc.aio
import pytest
from trivet_chassis.rpc import create_channel
from trivet_proto.v1 import inference_pb2, types_pb2
from trivet_proto.v1.inference_pb2_grpc import InferenceServiceStub

from tests.deployment import Deployment, eventually
from tests.gateway import Gateway, calling, finish_of
from tests.observables import NAMES, Observables, observe

STREAMS = 64
BACK_WITHIN = 3.0
KINDS = ("http stream", "http whole", "grpc stream")


async def over_http_stream(gateway: Gateway, prompt: str, length: int, leave_after: int | None) -> None:
    body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0.8, "seed": length}
    chunks = []
    async with gateway.streaming("/v1/completions", body) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if leave_after is not None and len(chunks) > leave_after:
                return
    assert leave_after is not None or finish_of(chunks) == "length"


async def over_http(gateway: Gateway, prompt: str, length: int, leave_after: int | None) -> None:
    asked = asyncio.create_task(gateway.complete(prompt, max_tokens=length, ignore_eos=True))
    if leave_after is None:
        assert (await asked)["usage"]["completion_tokens"] == length
        return
    await asyncio.wait({asked}, timeout=0.05 * leave_after)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked


async def over_grpc(stub: "InferenceServiceStub", prompt: str, length: int, leave_after: int | None) -> None:
    params = inference_pb2.GenerationParams(max_tokens=length, ignore_eos=True, seed=length)
    call = stub.Complete(inference_pb2.CompleteRequest(text=prompt, params=params))
    seen = 0
    with contextlib.suppress(asyncio.CancelledError):
        async for event in call:
            assert event.event.error.kind == types_pb2.ERROR_KIND_UNSPECIFIED, event
            seen += 1
            if leave_after is not None and seen > leave_after:
                call.cancel()
    assert leave_after is not None or await call.code() is grpc.StatusCode.OK


async def settled(deployment: Deployment) -> Observables:
    """A reading at rest: two in a row are equal."""
    last = await observe(deployment)

    async def same_again() -> Observables | None:
        nonlocal last
        before, last = last, await observe(deployment)
        return last if last == before else None

    return await eventually(same_again, within=20, what="the services come to rest")


async def test_sixty_four_streams_of_which_a_third_is_cancelled_leave_nothing(server: Deployment) -> None:
    chance = random.Random(11)
    (socket,) = server.folder.rglob("frontend.sock")
    async with calling(server.base_url) as warm:
        await warm.complete("Warm up every pool of threads and connections", max_tokens=4)
    before = await settled(server)
    assert {name for _, name in before.values} == set(NAMES)

    async def one(gateway: Gateway, stub: InferenceServiceStub, number: int) -> None:
        length = chance.choice((4, 16, 32, 64))
        prompt = " ".join(chance.choice(("river", "stone", "cloud", "lamp")) for _ in range(chance.choice((2, 20, 80))))
        leave_after = chance.randrange(8) if number % 3 == 0 else None
        kind = KINDS[number // 3 % 3]
        if kind == "http stream":
            await over_http_stream(gateway, prompt, length, leave_after)
        elif kind == "http whole":
            await over_http(gateway, prompt, length, leave_after)
        else:
            await over_grpc(stub, prompt, length, leave_after)

    async with calling(server.base_url) as gateway, create_channel(f"unix:{socket}") as channel:
        stub = InferenceServiceStub(channel)
        await asyncio.gather(*(one(gateway, stub, number) for number in range(STREAMS)))

    risen: dict[tuple[str, str], tuple[float, float]] = {}

    async def back() -> bool:
        nonlocal risen
        risen = (await observe(server)).risen_above(before)
        return not risen

    try:
        await eventually(back, within=BACK_WITHIN, what="the observables are back")
    except AssertionError:
        pytest.fail(f"above their values before, {BACK_WITHIN:g} s after the last stream: {risen}")


LONG_PROMPT = "The river runs past stone and cloud. " * 400
PER_KIND = [pytest.param(6, id="6 of each"), pytest.param(50, id="50 of each", marks=pytest.mark.long)]


async def leave_stream(gateway: Gateway, stub: InferenceServiceStub) -> None:
    await over_http_stream(gateway, "Once upon a time", 2000, 2)


async def leave_whole(gateway: Gateway, stub: InferenceServiceStub) -> None:
    await over_http(gateway, "Once upon a time", 2000, 10)


async def leave_queue(gateway: Gateway, stub: InferenceServiceStub) -> None:
    """At once: with so many others it has hardly been scheduled."""
    await over_http(gateway, "Once upon a time", 2000, 0)


async def leave_prefill(gateway: Gateway, stub: InferenceServiceStub) -> None:
    await over_http(gateway, LONG_PROMPT, 100, 4)


async def leave_grpc(gateway: Gateway, stub: InferenceServiceStub) -> None:
    await over_grpc(stub, "Once upon a time", 2000, 2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("per_kind", PER_KIND)
async def test_clients_that_leave_at_any_stage_leave_the_worker_idle(server: Deployment, per_kind: int) -> None:
    kinds = (leave_stream, leave_whole, leave_queue, leave_prefill, leave_grpc) * per_kind
    order = random.Random(5).sample(kinds, len(kinds))
    (socket,) = server.folder.rglob("frontend.sock")
    async with calling(server.base_url) as gateway, create_channel(f"unix:{socket}") as channel:
        expected = await gateway.complete("One, two, three,", max_tokens=32, ignore_eos=True)
        stub = InferenceServiceStub(channel)
        await asyncio.gather(*(leave(gateway, stub) for leave in order))
        await gateway.idle(within=2)
        again = await gateway.complete("One, two, three,", max_tokens=32, ignore_eos=True)
        assert again["choices"][0]["text"] == expected["choices"][0]["text"]
    errors = [line for line in server.log().splitlines() if '"level":"error"' in line or '"level":"critical"' in line]
    assert not errors, errors
