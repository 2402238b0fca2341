"""A client's request id is for logs and headers: whatever it is, requests do not mix."""

import asyncio
import re

import httpx
import pytest

from tests.gateway import Gateway, ids_of, together

PATH = "/v1/completions"
BODY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PLAIN = re.compile(r"^[\x21-\x7e]{1,256}$")


async def post(gateway: Gateway, prompt: str, request_id: str) -> httpx.Response:
    return await gateway.client.post(PATH, json=BODY | {"prompt": prompt}, headers={"X-Request-Id": request_id})


async def test_two_live_requests_with_one_id_get_their_own_answers(gateway: Gateway) -> None:
    alone = await together(*(gateway.complete(prompt, **BODY) for prompt in ("One, two, three,", "The capital of France is")))
    both = await together(post(gateway, "One, two, three,", "same"), post(gateway, "The capital of France is", "same"))
    for answer, expected in zip(both, alone, strict=True):
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "same"
        assert ids_of(answer.json()) == ids_of(expected)


async def test_the_end_of_one_does_not_touch_the_other_of_its_id(gateway: Gateway) -> None:
    expected = ids_of(await gateway.complete("One, two, three,", **BODY))
    leaving = asyncio.create_task(post(gateway, "Once upon a time", "same"))
    staying = asyncio.create_task(post(gateway, "One, two, three,", "same"))
    await asyncio.wait({leaving}, timeout=0.3)
    leaving.cancel()
    assert ids_of((await staying).json()) == expected
    assert ids_of((await post(gateway, "One, two, three,", "same")).json()) == expected
    await gateway.idle()


@pytest.mark.parametrize("request_id", ["x" * 10_000, "with space", "caf\u00e9", ""], ids=["long", "space", "accent", "empty"])
async def test_an_id_that_is_no_id_is_replaced_by_a_fresh_one(gateway: Gateway, request_id: str) -> None:
    answer = await gateway.client.post(
        PATH, json=BODY | {"prompt": "One,", "max_tokens": 2}, headers=[(b"X-Request-Id", request_id.encode("latin-1"))]
    )
    assert answer.status_code in (200, 431)
    if answer.status_code == 200:
        assert PLAIN.match(answer.headers["x-request-id"])


async def test_an_id_with_line_breaks_injects_no_header(gateway: Gateway) -> None:
    host, port = gateway.client.base_url.host, gateway.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    body = b'{"prompt": "One,", "max_tokens": 2}'
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}X-Request-Id: a\r\n X-Evil: yes\r\nConnection: close\r\n\r\n".encode() + body)
    answer = (await asyncio.wait_for(reader.read(), 30)).split(b"\r\n\r\n")[0].lower()
    writer.close()
    assert answer.startswith(b"http/1.1 ")
    assert b"\r\nx-evil" not in answer
    assert not answer.startswith(b"http/1.1 5")
    await gateway.still_answers()
