"""When a client goes away, what it asked for ends and its blocks are free within a second."""

import asyncio

from tests.deployment import eventually
from tests.gateway import Gateway

LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


async def held_blocks(gateway: Gateway) -> float:
    return (await gateway.metrics())["trivet_engine_blocks_in_use"]


async def until_blocks_are_held(gateway: Gateway) -> None:
    await eventually(lambda: held_blocks(gateway), within=5, what="the request holds blocks")


async def until_all_is_free(gateway: Gateway, *, within: float = 1.0) -> None:
    async def all_is_free() -> bool:
        return await held_blocks(gateway) == 0

    await eventually(all_is_free, within=within, what="no block is held")
    await gateway.idle(within=within)


async def test_a_stream_closed_early_frees_its_blocks_within_a_second(gateway: Gateway) -> None:
    await gateway.idle()
    async with gateway.streaming("/v1/completions", LONG) as chunks:
        await anext(chunks)
        await until_blocks_are_held(gateway)
    await until_all_is_free(gateway)
    await gateway.still_answers()


async def test_a_chat_stream_closed_early_frees_its_blocks_within_a_second(gateway: Gateway) -> None:
    await gateway.idle()
    body = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 2000, "ignore_eos": True}
    async with gateway.streaming("/v1/chat/completions", body) as chunks:
        await anext(chunks)
        await until_blocks_are_held(gateway)
    await until_all_is_free(gateway)


async def test_a_client_that_does_not_wait_for_its_whole_answer_frees_its_blocks_within_a_second(gateway: Gateway) -> None:
    await gateway.idle()
    call = asyncio.create_task(gateway.post("/v1/completions", LONG))
    await until_blocks_are_held(gateway)
    call.cancel()
    await asyncio.wait([call])
    await until_all_is_free(gateway)


async def test_an_aborted_request_is_counted_as_aborted(gateway: Gateway) -> None:
    await gateway.idle()
    before = (await gateway.metrics())["vllm:request_success_total"]
    async with gateway.streaming("/v1/completions", LONG) as chunks:
        await anext(chunks)

    async def is_counted() -> bool:
        return (await gateway.metrics())["vllm:request_success_total"] == before + 1

    await eventually(is_counted, within=2, what="the request is in the finished counter")


async def test_other_streams_go_on_when_one_is_closed(gateway: Gateway) -> None:
    alone = await gateway.complete("One, two, three,", max_tokens=48, ignore_eos=True)
    async with gateway.streaming("/v1/completions", LONG) as chunks:
        await anext(chunks)
        other = asyncio.create_task(gateway.complete("One, two, three,", max_tokens=48, ignore_eos=True))
        await anext(chunks)
    assert (await other)["choices"][0]["text"] == alone["choices"][0]["text"]
