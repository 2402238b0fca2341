"""What was computed once is not computed again, and the usage says so."""

from tests.deployment import eventually
from tests.gateway import Gateway, ids_of

LETTER = "Dear harbour master, the buoy at the northern entrance has lost its light, and two boats came in by luck alone. " * 4


async def test_the_same_prompt_sent_twice_shows_cached_tokens_the_second_time(gateway: Gateway) -> None:
    first = await gateway.complete(LETTER, max_tokens=8, return_token_ids=True, cache_salt="twice")
    second = await gateway.complete(LETTER, max_tokens=8, return_token_ids=True, cache_salt="twice")
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16
    assert ids_of(first) == ids_of(second)


async def test_the_same_conversation_sent_twice_shows_cached_tokens_the_second_time(gateway: Gateway) -> None:
    first = await gateway.chat(LETTER, max_tokens=4, cache_salt="talk")
    second = await gateway.chat(LETTER, max_tokens=4, cache_salt="talk")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (first["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


async def test_the_last_chunk_of_a_stream_counts_cached_tokens_too(gateway: Gateway) -> None:
    wishes = {"max_tokens": 4, "cache_salt": "stream", "stream_options": {"include_usage": True}}
    await gateway.stream_completion(LETTER, **wishes)
    usage = (await gateway.stream_completion(LETTER, **wishes))[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16


async def test_a_prompt_with_another_salt_finds_nothing(gateway: Gateway) -> None:
    await gateway.complete(LETTER, max_tokens=1, cache_salt="mine")
    other = await gateway.complete(LETTER, max_tokens=1, cache_salt="yours")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_longer_prompt_reuses_the_blocks_of_its_beginning(gateway: Gateway) -> None:
    ids = await gateway.tokenize(LETTER)
    await gateway.complete(ids[:40], max_tokens=1, cache_salt="beginning")
    longer = await gateway.complete(ids[:80], max_tokens=1, cache_salt="beginning")
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_the_hits_are_counted_in_the_metrics(gateway: Gateway) -> None:
    before = await gateway.metrics()
    await gateway.complete(LETTER, max_tokens=1, cache_salt="counted")
    usage = (await gateway.complete(LETTER, max_tokens=1, cache_salt="counted"))["usage"]

    # Load reports come each second, so the counters may be that old, before and after.
    async def are_counted() -> bool:
        after = await gateway.metrics()
        hits, queries = (after[name] - before[name] for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"))
        return hits >= usage["prompt_tokens_details"]["cached_tokens"] > 0 and queries >= 2 * usage["prompt_tokens"]

    await eventually(are_counted, within=3, what="hits and queries are counted")
