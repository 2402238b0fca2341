"""Messages beyond 4 MB pass, messages beyond the product's own limit are refused by name, over HTTP."""

from typing import Any

import pytest
from trivet_proto.limits import MAX_MESSAGE_BYTES, MIB

from tests.gateway import Gateway, together

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def schemas(size: int) -> list[dict[str, Any]]:
    """Tool definitions of about `size` bytes together."""
    one = {"type": "function", "function": {"name": "f", "description": "d" * 10_000, "parameters": {"type": "object", "properties": {}}}}
    return [one | {"function": one["function"] | {"name": f"f{number}"}} for number in range(size // 10_000)]  # type: ignore[operator]


async def test_a_prompt_of_five_mebibytes_is_refused_for_its_length(gateway: Gateway) -> None:
    refusal = await gateway.refusal(COMPLETIONS, {"prompt": "word " * MIB, "max_tokens": 1})
    assert (refusal.status, refusal.param) == (400, "prompt")
    await gateway.still_answers()


async def test_five_megabytes_of_tools_that_are_not_used_do_not_reach_the_prompt(gateway: Gateway) -> None:
    answer = await gateway.chat("Hello", tools=schemas(5_000_000), tool_choice="none", max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 31


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_beyond_the_limit_is_refused_with_the_limit(gateway: Gateway, path: str) -> None:
    body = b'{"prompt": "' + b"x" * MAX_MESSAGE_BYTES + b'"}'
    response = await gateway.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    error = response.json()["error"]
    assert str(MAX_MESSAGE_BYTES) in error["message"] or "32 MiB" in error["message"]
    await gateway.still_answers()


async def test_a_body_beyond_the_limit_disturbs_nobody(gateway: Gateway) -> None:
    body = b"x" * (MAX_MESSAGE_BYTES + 1)
    response, answer = await together(
        gateway.client.post(CHAT, content=body), gateway.complete("The capital of France is", max_tokens=24, ignore_eos=True)
    )
    assert response.status_code == 413
    assert answer["usage"]["completion_tokens"] == 24


async def test_prompt_logprobs_of_a_longer_prompt_have_an_entry_for_each_token(gateway: Gateway) -> None:
    answer = await gateway.complete([19556, 28] * 400, prompt_logprobs=20, max_tokens=1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == 800


@pytest.mark.long
async def test_prompt_logprobs_of_eight_thousand_tokens_come_back_whole(gateway: Gateway) -> None:
    """A reply of about 5 MB."""
    answer = await gateway.complete([19556, 28] * 4000, prompt_logprobs=20, max_tokens=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert len(entries) == 8000
    assert entries[0] is None
    assert all(20 <= len(entry) <= 21 for entry in entries[1:])
    await gateway.still_answers()
