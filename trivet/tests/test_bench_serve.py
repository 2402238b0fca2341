"""`trivet bench serve` against a real frontend and scheduler with a mock worker behind them: figures that add up, files, exit codes."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from trivet.__main__ import main
from trivet.bench.process_tree import end, resume, suspend, tree
from trivet.bench.server_under_test import free_port

WITHIN_S = 60.0
PNG = b"\x89PNG\r\n\x1a\n"
PERCENTILES = {
    "type": "object",
    "required": ["p50", "p90", "p99"],
    "additionalProperties": {"type": ["number", "null"]},
}
FIGURES = {
    "type": "object",
    "required": ["seconds", "answered", "failed", "output_tokens", "prompt_tokens", "cached_tokens", "client_core_share", "goodput_share"],
    "properties": {
        **{f"{series}_ms": PERCENTILES for series in ("ttft", "itl", "tpot", "e2e")},
        **{rate: {"type": "number", "minimum": 0} for rate in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")},
        "goodput_share": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "failures": {"type": "array", "items": {"type": "string"}},
    },
}
ROW = {
    "type": "object",
    "required": ["server", "workload", "figures"],
    "properties": {"server": {"type": "string"}, "workload": {"type": "string"}, "figures": FIGURES},
}
FILE = {
    "type": "object",
    "required": ["schema", "command", "version", "at", "machine", "seed", "servers", "runs", "medians", "ratios", "workloads"],
    "properties": {
        "schema": {"const": 1},
        "command": {"const": "serve"},
        "seed": {"type": "string"},
        "servers": {"type": "array", "items": {"type": "object", "required": ["name", "url", "model", "ready_s", "processes", "pss_mib"]}},
        "runs": {"type": "array", "items": ROW},
        "medians": {"type": "array", "items": ROW},
        "ratios": {"type": "array", "items": {"type": "object", "required": ["workload", "server", "against", "output_tokens_per_s"]}},
    },
}


RELAY = """
import asyncio, signal, sys

to, noted, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def note(*_):
    with open(noted, "a") as file:
        file.write("on ")


async def pass_on(reader, writer):
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def relay(reader, writer):
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", to)
    await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))


async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", port)
    await server.serve_forever()


signal.signal(signal.SIGCONT, note)
asyncio.run(main())
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(WITHIN_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=WITHIN_S) as answer:
            return bool(json.load(answer)["data"])
    except urllib.error.HTTPError as refused:
        refused.close()
        return False
    except OSError:
        return False


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway whose worker is a double."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        scheduler, worker, port = f"unix:{folder}/s.sock", f"unix:{folder}/w.sock", free_port()
        quiet = ("--metrics-listen", "", "--log-level", "warning")
        frontend = ("--port", str(port), "--grpc-listen", f"unix:{folder}/g.sock", "--log-level", "warning")
        processes = [
            stack.enter_context(running("trivet_scheduler", "--listen", scheduler, *quiet)),
            stack.enter_context(running("trivet_doubles.mock_worker", "--synthetic", "--scheduler", scheduler, "--listen", worker, *quiet)),
            stack.enter_context(running("trivet_frontend", "--scheduler", scheduler, *frontend)),
        ]
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WITHIN_S
        while not answers(address):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)  # between two looks
        yield address


Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(url: str, tmp_path: Path) -> Bench:
    """Runs it with these flags; its exit code, and what it wrote."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "figures.json"
        code = main(["bench", "serve", "--url", url, "--prompts", "ids", "--vocabulary", "10:400", "--json", str(file), *flags])
        return code, json.loads(file.read_text())

    return run


def test_the_four_workloads_give_every_token_that_was_asked_for(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "figures.png"
    code, content = bench("--requests", "3", "--output-tokens", "6", "--slo", "ttft=60000,tpot=60000", "--plot", str(plot))
    assert code == 0
    jsonschema.validate(content, FILE)
    assert [row["workload"] for row in content["runs"]] == ["W1", "W2", "W3", "W4"]
    for row, prompt in zip(content["runs"], (128, 256, 1024 + 32, 3000), strict=True):
        figures = row["figures"]
        assert (figures["answered"], figures["failed"]) == (3, 0)
        assert (figures["output_tokens"], figures["prompt_tokens"]) == (3 * 6, 3 * prompt)
        assert figures["tokens_are_counted"]
        assert figures["output_tokens_per_s"] == pytest.approx(18 / figures["seconds"])
        assert (figures["goodput_share"], figures["goodput_per_s"]) == (1, pytest.approx(3 / figures["seconds"]))
        assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"] <= 1e3 * figures["seconds"]
    assert plot.read_bytes().startswith(PNG)
    shown = capsys.readouterr().out
    assert all(f"| {name:>8} |" in shown for name in ("W1", "W2", "W3", "W4"))


def test_only_what_a_workload_shares_comes_out_of_the_cache(bench: Bench) -> None:
    _, content = bench("--workload", "W1,W3", "--requests", "4", "--concurrency", "1", "--output-tokens", "2", "--runs", "2")
    alone, shared = ([row["figures"] for row in content["runs"] if row["workload"] == name] for name in ("W1", "W3"))
    assert [figures["cached_tokens"] for figures in alone] == [0, 0]
    assert [figures["cached_tokens"] for figures in shared] == [3 * 1024, 3 * 1024]


def test_a_promise_that_cannot_be_kept_is_no_goodput(bench: Bench) -> None:
    code, content = bench("--workload", "W1", "--requests", "2", "--output-tokens", "2", "--slo", "e2e=0.001")
    assert code == 0
    assert content["medians"][0]["figures"]["goodput_share"] == 0


def test_an_open_loop_sends_all_and_takes_as_long_as_its_arrivals(bench: Bench) -> None:
    code, content = bench(
        "--workload", "synthetic", "--input-tokens", "20", "--output-tokens", "2", "--requests", "8", "--rate", "40", "--burst", "4"
    )
    assert code == 0
    assert content["loop"] == {"rate": 40, "burst": 4}
    assert content["runs"][0]["figures"]["answered"] == 8


def test_the_chat_endpoint_is_measured_too(url: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ("--endpoint", "chat", "--workload", "W1", "--requests", "2", "--input-tokens", "4", "--output-tokens", "4")
    assert main(["bench", "serve", "--url", url, *flags, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["runs"][0]["figures"]["output_tokens"] == 8


def test_requests_that_are_refused_are_failures_and_an_exit_status(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = bench("--workload", "W1", "--requests", "2", "--vocabulary", "100000:100001", "--slo", "ttft=1000")
    assert code == 1
    jsonschema.validate(content, FILE)
    figures = content["runs"][0]["figures"]
    assert (figures["answered"], figures["failed"], figures["output_tokens"], figures["goodput_share"]) == (0, 2, 0, 0)
    assert "not in the vocabulary" in figures["failures"][0]
    assert "failed: HTTP/1.1 400" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_told_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["bench", "serve", "--url", url, "--workload", "W1", "--model", "m"]) == 2
    assert capsys.readouterr().out == ""
    assert main(["bench", "serve", "--url", url]) == 2
    assert f"at {url} does not answer: ConnectionRefusedError" in capsys.readouterr().err


def test_a_server_that_leaves_is_a_failure_row(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def list_models_and_leave() -> None:
            connection, _ = listener.accept()
            listener.close()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}')

        leaving = threading.Thread(target=list_models_and_leave)
        leaving.start()
        flags = ("--workload", "W1", "--requests", "2", "--no-warm-up")
        assert main(["bench", "serve", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", *flags]) == 1
        leaving.join()
    assert "failed: ConnectionRefusedError" in capsys.readouterr().out


def test_a_peer_is_started_weighed_interleaved_and_stopped(bench: Bench, url: str, tmp_path: Path) -> None:
    script = tmp_path / "peer.sh"
    double = f"{sys.executable} -m trivet_doubles.mock_scheduler --synthetic --listen unix:{tmp_path}/p.sock --metrics-listen ''"
    frontend = f"{sys.executable} -m trivet_frontend --scheduler unix:{tmp_path}/p.sock --grpc-listen unix:{tmp_path}/pg.sock --port $1"
    script.write_text(f"{double} &\n{frontend}\n")
    code, content = bench(
        "--workload", "W1", "--requests", "2", "--output-tokens", "3", "--runs", "2", "--against", f"peer=sh {script} {{port}}"
    )
    assert code == 0
    jsonschema.validate(content, FILE)
    ours = url.removeprefix("http://")
    assert [row["server"] for row in content["runs"]] == [ours, "peer", "peer", ours]
    (ratio,) = content["ratios"]
    assert (ratio["server"], ratio["against"]) == (ours, "peer")
    middle = {row["server"]: row["figures"]["output_tokens_per_s"] for row in content["medians"]}
    assert ratio["output_tokens_per_s"] == pytest.approx(middle[ours] / middle["peer"])
    running_here, peer = content["servers"]
    assert (running_here["ready_s"], running_here["processes"], running_here["pss_mib"]) == (None, [], None)
    assert peer["ready_s"] > 0
    assert {"trivet_doubles.mock_scheduler", "trivet_frontend"} <= {process["name"] for process in peer["processes"]}
    assert all(process["pss_mib"] > 0 and process["peak_rss_mib"] > 0 for process in peer["processes"])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(peer["url"].rpartition(":")[2]))) != 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.timeout(WITHIN_S)
def test_a_process_stands_still_with_all_below_it_and_goes_on() -> None:
    """A peer that is not measured; the state T is a stopped process."""
    command = ("sh", "-c", "sleep 600 & echo started; wait")
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        suspend(process.pid)
        pids = tree(process.pid)
        assert len(pids) == 2
        while {state_of(pid) for pid in pids} != {"T"}:
            time.sleep(0.01)  # between two looks
        resume(process.pid)
        while "T" in {state_of(pid) for pid in pids}:
            time.sleep(0.01)  # between two looks
        end(process, 1.0)  # then it is killed: a shell in the background ignores interrupts
    assert process.returncode is not None


def test_a_peer_stands_still_while_another_is_measured(bench: Bench, url: str, tmp_path: Path) -> None:
    """It is a relay to the server here, which notes down when it goes on again."""
    script, noted = tmp_path / "peer.py", tmp_path / "noted"
    script.write_text(RELAY)
    peer = f"peer={sys.executable} {script} {url.rpartition(':')[2]} {noted} {{port}}"
    code, content = bench("--workload", "W1", "--requests", "2", "--output-tokens", "3", "--runs", "2", "--against", peer)
    assert code == 0
    assert [row["server"] for row in content["runs"]].count("peer") == 2
    assert len(noted.read_text().split()) == 3  # before each of its runs, and before its end


def test_what_it_started_ends_with_it_when_it_is_told_to_end(url: str, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    peer = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-m", "trivet", "bench", "serve", "--url", url, "--against", f'silent={sys.executable} -c "{peer}" {{port}}']
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + WITHIN_S
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)  # between two looks
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{told.read_text()}").exists()


def test_a_peer_that_ends_instead_of_serving_is_an_error_with_its_last_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = "peer=sh -c 'echo no such weights; exit 3' {port}"
    assert main(["bench", "serve", "--url", url, "--model", "m", "--against", peer]) == 2
    assert "trivet: peer ended with 3" in (shown := capsys.readouterr().err)
    assert "no such weights" in shown


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--workload", "W9"], "--workload W9 is not known"),
        (["--rate", "nan"], "--rate nan: more than 0 is wanted"),
        (["--runs", "0"], "--runs 0: more than 0 is wanted"),
        (["--burst", "3"], "--burst belongs to an open loop"),
        (["--slo", "fast"], "--slo fast: milliseconds by name"),
        (["--url", "https://host"], "TLS is not measured"),
        (["--against", "peer=serve"], "--against peer=serve: a URL is wanted"),
        (["--extra", "[]"], "--extra []: a JSON object is wanted"),
        (["--vocabulary", "9:3"], "--vocabulary 9:3"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: no file can be written there"),
        (["--plot", "figures.gif"], "a name that ends in .png"),
        (["--url", "http://host", "--", "--port", "1"], "with --url none is"),
        (["--", "--port", "1"], "--port after --"),
        (["--wrokload", "W1"], "trivet bench serve: unrecognized arguments: --wrokload"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_readable_line_before_anything_is_measured(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trivet: ")
    assert complaint in error
    assert error.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench", "serve", "--plot", "figures.png"]) == 2
    assert "pip install 'trivet[bench]'" in capsys.readouterr().err
