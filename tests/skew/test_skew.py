"""Services of another contract work with those of this commit: an older one in each of the three places, and newer ones everywhere.

The older services are those of the last commit that released a contract (or the commit before this one). The newer contract is a relay on
both links that adds unknown fields to every message.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.agreement import all_at_once, assert_agreement
from tests.deployment import free_port
from tests.gateway import Gateway, calling, finish_of, text_of
from tests.references.greedy import read_references
from tests.services import running, until_serving
from tests.skew.newer_contract import relaying
from tests.skew.older import OlderTree, check_out, older_revision

REVISION = older_revision()
PLACES = ("trivet_frontend", "trivet_scheduler", "trivet_worker")
REFERENCES = read_references()[:3]

needs_history = pytest.mark.skipif(REVISION is None, reason="no older commit: this is no clone, or one without history")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> OlderTree:
    assert REVISION is not None
    tree = check_out(REVISION, tmp_path_factory.mktemp("older"))
    for module in PLACES:
        assert Path(tree.imports_from(module)).is_relative_to(tree.folder)
    return tree


@asynccontextmanager
async def three_services(
    folder: Path, *, paths: Mapping[str, str], scheduler_for_workers: str = "", scheduler_for_frontends: str = ""
) -> AsyncIterator[Gateway]:
    """One of each; `paths` says from where a service imports, the others say where else than at the scheduler itself it is dialled."""
    scheduler, worker, port = f"unix:{folder}/scheduler.sock", f"unix:{folder}/worker.sock", free_port()

    def service(module: str, *flags: str):  # type: ignore[no-untyped-def]
        return running(module, *flags, folder=folder, python_path=paths.get(module, ""))

    async with (
        service("trivet_scheduler", f"--listen={scheduler}", "--metrics-listen=") as of_tokens,
        service(
            "trivet_worker",
            f"--scheduler={scheduler_for_workers or scheduler}",
            f"--listen={worker}",
            "--metrics-listen=",
            "--dtype=float32",
            "--num-kv-blocks=300",
        ) as of_tensors,
        service(
            "trivet_frontend",
            f"--scheduler={scheduler_for_frontends or scheduler}",
            f"--port={port}",
            f"--grpc-listen=unix:{folder}/frontend.sock",
        ) as of_text,
    ):
        for process, address in ((of_tensors, worker), (of_text, f"unix:{folder}/frontend.sock")):
            await until_serving(process, address)
        assert of_tokens.is_alive
        async with calling(f"http://127.0.0.1:{port}") as gateway:
            yield gateway


async def converse(gateway: Gateway) -> None:
    """What the links carry: batches, streams, stop strings, several choices, logprobs, an abort, a refusal."""
    assert_agreement(REFERENCES, await all_at_once(gateway, REFERENCES))
    chunks = await gateway.stream_chat("What is the capital of France?", max_tokens=24, stop=["Paris"])
    assert finish_of(chunks) == "stop"
    assert "Paris" not in text_of(chunks)
    answer = await gateway.complete("The capital of France is", max_tokens=4, n=2, seed=7, temperature=0.8, logprobs=2, echo=True)
    assert len(answer["choices"]) == 2
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5 + 4
    async with gateway.streaming("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}) as left_early:
        await anext(left_early)
    await gateway.idle()
    assert (await gateway.refusal("/v1/completions", {"prompt": "x" * 40_000, "max_tokens": 4})).status == 400
    await gateway.still_answers()


@needs_history
@pytest.mark.parametrize("place", PLACES)
async def test_an_older_service_works_with_those_of_this_commit(tmp_path: Path, older: OlderTree, place: str) -> None:
    async with three_services(tmp_path, paths={place: older.python_path()}) as gateway:
        await converse(gateway)


async def test_what_a_newer_contract_adds_to_any_message_disturbs_nobody(tmp_path: Path) -> None:
    scheduler, upper, lower = (f"unix:{tmp_path}/{name}.sock" for name in ("scheduler", "upper", "lower"))
    async with (
        relaying(upper, scheduler) as to_frontend,
        relaying(lower, scheduler) as to_worker,
        three_services(tmp_path, paths={}, scheduler_for_workers=lower, scheduler_for_frontends=upper) as gateway,
    ):
        await converse(gateway)
        assert min(to_frontend.upward, to_frontend.downward, to_worker.upward, to_worker.downward) > 10
