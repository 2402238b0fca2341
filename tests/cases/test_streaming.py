"""Streamed text is right to the character, with the ids forced through request fields."""

from typing import Any

import pytest

from tests.forcing import PROMPT, forcing
from tests.gateway import Gateway, deltas_of, finish_of, ids_of, text_of, together

COMPLETIONS = "/v1/completions"
REPLACEMENT = "\ufffd"
WAVING_HAND = [10813, 235, 229]
D_WITH_CARON = [143, 233]


async def whole_and_stream(gateway: Gateway, prompt: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """The same request both ways; text and reason must agree, and so must the ids."""
    wishes = {"return_token_ids": True} | fields
    whole = await gateway.complete(prompt, **wishes)
    chunks = await gateway.stream_completion(prompt, **wishes)
    choice = whole["choices"][0]
    assert text_of(chunks) == choice["text"]
    assert finish_of(chunks) == choice["finish_reason"]
    assert [token for chunk in chunks for piece in chunk["choices"] for token in piece["token_ids"]] == choice["token_ids"]
    return whole, chunks


# Characters over several tokens


@pytest.mark.parametrize(("ids", "character"), [(WAVING_HAND, "\U0001f44b"), (D_WITH_CARON, "\u010f")], ids=["emoji", "letter"])
async def test_a_character_of_several_tokens_comes_whole_with_its_last(gateway: Gateway, ids: list[int], character: str) -> None:
    whole, chunks = await whole_and_stream(gateway, PROMPT, **forcing(ids))
    assert ids_of(whole) == ids
    assert whole["choices"][0]["text"] == character
    assert [delta for delta in deltas_of(chunks) if delta] == [character]
    early = [token for chunk in chunks for piece in chunk["choices"] if not piece["text"] for token in piece["token_ids"]]
    assert ids[-1] not in early


async def test_a_conversation_streams_a_character_of_several_tokens_whole_too(gateway: Gateway) -> None:
    chunks = await gateway.stream_chat("Wave!", **forcing(WAVING_HAND))
    assert [delta for delta in deltas_of(chunks) if delta] == ["\U0001f44b"]


async def test_a_character_that_the_limit_cuts_is_the_same_streamed_and_whole(gateway: Gateway) -> None:
    whole, _ = await whole_and_stream(gateway, PROMPT, **forcing(WAVING_HAND) | {"max_tokens": 2})
    assert ids_of(whole) == WAVING_HAND[:2]
    one_shot = await gateway.detokenize(WAVING_HAND[:2])
    assert one_shot.startswith(whole["choices"][0]["text"])
    assert set(whole["choices"][0]["text"]) <= {REPLACEMENT}


async def test_a_replacement_character_that_the_model_writes_passes_through(gateway: Gateway) -> None:
    whole, _ = await whole_and_stream(gateway, PROMPT, **forcing([24211, 7042]))
    assert ids_of(whole) == [24211, 7042]
    assert REPLACEMENT in whole["choices"][0]["text"]


# Prompts that end inside a character

CUT_PEPPER = [19556, 905, 15107, 230]
"""Hello world, a space, and the first 3 of the 4 bytes of a hot pepper (U+1F336)."""


async def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_text(gateway: Gateway) -> None:
    whole, chunks = await whole_and_stream(gateway, CUT_PEPPER, max_tokens=8)
    assert whole["usage"]["prompt_tokens"] == 4
    assert "Hello" not in text_of(chunks)
    assert "world" not in text_of(chunks)


async def test_the_byte_that_completes_the_prompts_character_gives_it_or_nothing(gateway: Gateway) -> None:
    whole, _ = await whole_and_stream(gateway, CUT_PEPPER, **forcing([131, 7042]))
    assert ids_of(whole) == [131, 7042]
    assert whole["choices"][0]["text"] in (" Paris", "\U0001f336 Paris")


# Stop strings

ALPHABET = [33203, 23960, 57, 58]
"""DEF, GH, I, J."""

STOPS: list[tuple[str | list[str], str, str, str]] = [
    ("DE", "", "DE", "DE"),
    ("DEFGHIJ", "", "DEFGHIJ", "DEFGHIJ"),
    ("EFG", "D", "DEFG", "EFG"),
    (["ZZ", "GHI"], "DEF", "DEFGHI", "GHI"),
]


@pytest.mark.parametrize(("stop", "text", "text_with_stop", "matched"), STOPS, ids=[str(case[0]) for case in STOPS])
async def test_a_stop_string_ends_the_text_wherever_tokens_begin_and_end(
    gateway: Gateway, stop: str | list[str], text: str, text_with_stop: str, matched: str
) -> None:
    for include, wanted in ((False, text), (True, text_with_stop)):
        whole, _ = await whole_and_stream(gateway, PROMPT, stop=stop, include_stop_str_in_output=include, **forcing(ALPHABET))
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (wanted, "stop", matched)


async def test_a_stop_string_alone_and_in_a_list_are_alike(gateway: Gateway) -> None:
    alone, listed = await together(
        gateway.complete(PROMPT, stop="EFG", **forcing(ALPHABET)), gateway.complete(PROMPT, stop=["EFG"], **forcing(ALPHABET))
    )
    assert alone["choices"] == listed["choices"]
    assert alone["usage"]["completion_tokens"] == listed["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stop", [None, []], ids=repr)
async def test_no_stop_string_stops_nothing(gateway: Gateway, stop: Any) -> None:
    whole, _ = await whole_and_stream(gateway, PROMPT, stop=stop, **forcing(ALPHABET))
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("DEFGHIJ", "length")


@pytest.mark.parametrize("stop", ["", [""], ["DE", ""], 7, [7], {"DE": 1}], ids=repr)
async def test_a_stop_that_is_empty_or_no_text_is_refused(gateway: Gateway, stop: Any) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": PROMPT, "stop": stop})
    assert refusal.status == 400
    assert (refusal.param or "").startswith("stop")


async def test_a_stop_string_is_not_looked_for_before_min_tokens(gateway: Gateway) -> None:
    whole, _ = await whole_and_stream(gateway, PROMPT, stop="GH", min_tokens=3, **forcing(ALPHABET))
    assert whole["usage"]["completion_tokens"] >= 3


async def test_a_stop_token_ends_the_request_without_its_text(gateway: Gateway) -> None:
    whole, _ = await whole_and_stream(gateway, PROMPT, stop_token_ids=[57], **forcing(ALPHABET))
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("DEFGH", "stop", 57)


async def test_text_that_might_begin_a_stop_string_is_held_back_not_lost(gateway: Gateway) -> None:
    _, chunks = await whole_and_stream(gateway, PROMPT, stop=["GHX", "IJK"], **forcing(ALPHABET))
    assert text_of(chunks) == "DEFGHIJ"
