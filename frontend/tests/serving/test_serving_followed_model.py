"""A model whose template or tokenizer cannot be read: who waits for it is told why, who may get another keeps what it has."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet_chassis.in_process import InProcessServer
from trivet_chassis.lifecycle import Lifecycle
from trivet_checkpoint import ModelBundle
from trivet_frontend.config import FrontendSettings
from trivet_frontend.offline import OfflineFrontend
from trivet_frontend.server import Frontend, serve
from trivet_frontend.serving import CompletionInput, GenerationOptions, read_template
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import engine_pb2, engine_pb2_grpc

BROKEN = {"chat_template.jinja": b"hello\n{% if x", "tokenizer.json": b'{"model": {"type": "Nope", "vocab": {}}, "added_tokens": []}'}
WORDS = {
    "chat_template.jinja": r"^the chat template of SmolLM2-135M-Instruct \(tokenizer.chat_template\) is no template: .* \(line 2\); mend",
    "tokenizer.json": r"^the tokenizer of SmolLM2-135M-Instruct \(tokenizer.json\) cannot be read: .*; mend",
}


def give(scheduler: Any, bundle: bytes) -> None:
    """The scheduler's model is another from now on; frontends that are there are told."""
    scheduler.bundle, scheduler.digest = bundle, hashlib.sha256(bundle).digest()
    scheduler.say(engine_pb2.SessionResponse(model=engine_pb2.Model(card=scheduler.card())))


def broken(bundle: bytes, name: str) -> bytes:
    return ModelBundle({**ModelBundle.from_bytes(bundle).files, name: BROKEN[name]}).to_bytes()


@pytest.mark.parametrize("name", BROKEN)
async def test_a_frontend_that_is_to_end_for_it_names_what_cannot_be_read(scheduler: Any, name: str) -> None:
    give(scheduler, broken(scheduler.bundle, name))
    settings = FrontendSettings(scheduler=(scheduler.address,), port=0, grpc_listen="", exit_on_unreadable_model=True)
    with pytest.raises(TrivetError, match=WORDS[name]) as caught:
        await asyncio.wait_for(serve(settings, Lifecycle()), 10)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


async def test_an_offline_frontend_says_why_it_does_not_get_ready(new_scheduler: Callable[..., Any]) -> None:
    server, scheduler = InProcessServer(), new_scheduler("in-process")
    give(scheduler, broken(scheduler.bundle, "chat_template.jinja"))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(scheduler, server)
    async with OfflineFrontend(FrontendSettings(scheduler=("unix:/nowhere",)), dial=server.dial) as frontend:
        with pytest.raises(TrivetError, match=WORDS["chat_template.jinja"]):
            await asyncio.wait_for(frontend.until_ready(), 10)
    await server.close()


async def test_a_frontend_alone_waits_for_another_model_and_keeps_the_one_it_has(
    scheduler: Any, start_frontend: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = scheduler.bundle
    give(scheduler, broken(good, "tokenizer.json"))

    async def until_refused(count: int) -> None:
        async with asyncio.timeout(10):
            while sum("another is waited for" in record.getMessage() for record in caplog.records) < count:
                await asyncio.sleep(0.01)

    async def mend_once_refused() -> None:
        await until_refused(1)
        give(scheduler, good)

    mending = asyncio.create_task(mend_once_refused())
    async with start_frontend() as frontend:
        await mending
        assert await answered(frontend)
        give(scheduler, broken(good, "chat_template.jinja"))
        await until_refused(2)
        assert await answered(frontend)


async def answered(frontend: Frontend) -> str:
    prompt = CompletionInput(prompt="a long text " * 60)  # which is tokenized in a thread
    generation = await frontend.inference.complete(prompt, GenerationOptions(max_tokens=2), model=None, request_id="r")
    try:
        return "".join([delta.text async for delta in generation.deltas()])
    finally:
        generation.close()


def test_a_template_of_the_settings_is_refused_with_its_file_before_anything_is_dialled(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    for content, words in (
        (b"{% if x", r" is no template: .* \(line 1\); mend"),
        (b"\xff", " cannot be read"),
        (b"x" * 300_000, " has 300000 char"),
    ):
        path.write_bytes(content)
        with pytest.raises(TrivetError, match=f"^the chat template {path}{words}") as caught:
            read_template(str(path))
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "chat_template")
    path.write_text("{{ messages }}")
    assert (read_template(str(path)), read_template("")) == ("{{ messages }}", None)
