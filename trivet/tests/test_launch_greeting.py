"""What is printed in the end can be pasted into a shell."""

import json
import os
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from trivet.launch.greeting import base_url, greet, greeting, served_model
from trivet.launch.plan import Gateway, LaunchPlan

PRIVATE = "unix:/run/frontend.sock"


def curl_words(text: str) -> list[str]:
    command = text[text.index("curl") :].split("\n\n")[0]
    return shlex.split(command.replace("\\\n", " "))


def test_the_curl_line_is_one_command_with_a_valid_body() -> None:
    words = curl_words(greeting(Gateway(host="127.0.0.1", port=8123, uds="", grpc_listen=PRIVATE), "it's a model"))
    assert "http://127.0.0.1:8123/v1/chat/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert body["messages"][0]["role"] == "user"
    assert (body["max_tokens"], body["temperature"]) == (64, 0)


def test_without_a_name_the_body_has_no_model() -> None:
    words = curl_words(greeting(Gateway(host="127.0.0.1", port=8123, uds="", grpc_listen=PRIVATE), None))
    assert set(json.loads(words[words.index("-d") + 1])) == {"messages", "max_tokens", "temperature"}


def test_a_key_is_asked_for_but_not_shown() -> None:
    text = greeting(Gateway(host="127.0.0.1", port=1, uds="", grpc_listen=PRIVATE, api_key="hush"), "m")
    assert "hush" not in text
    assert "Authorization: Bearer YOUR_KEY" in curl_words(text)


def test_a_socket_is_called_through_curl_too() -> None:
    words = curl_words(greeting(Gateway(host="127.0.0.1", port=1, uds="/run/my api.sock", grpc_listen=PRIVATE), "m"))
    assert words[words.index("--unix-socket") + 1] == "/run/my api.sock"


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("example.org", "http://example.org:80")]
)
def test_the_url_is_one_that_can_be_dialled(host: str, url: str) -> None:
    assert base_url(Gateway(host=host, port=80, uds="", grpc_listen=PRIVATE)) == url


def test_the_command_for_one_more_worker_can_be_pasted() -> None:
    command = ["/a path/python", "-m", "trivet_worker", "--scheduler=unix:/run/x/scheduler.sock", "--listen="]
    lines = greeting(Gateway(host="127.0.0.1", port=1, uds="", grpc_listen=PRIVATE), "m", command).splitlines()
    assert command in [shlex.split(line) for line in lines if "trivet_worker" in line]


async def test_a_greeting_that_nobody_reads_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr("sys.stdout", stream)
    await greet(LaunchPlan((), Gateway(host="127.0.0.1", port=1, uds=str(tmp_path / "nobody"), grpc_listen=PRIVATE), ()))
    stream.close()  # what nobody took is forgotten: this doesn't raise


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.headers["Authorization"] == "Bearer hush"
        body = b'{"data": [{"id": "small"}]}' if known else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def models_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_the_model_is_named_by_the_gateway(models_port: int) -> None:
    assert served_model(Gateway(host="127.0.0.1", port=models_port, uds="", grpc_listen=PRIVATE, api_key="hush")) == "small"


def test_a_gateway_that_does_not_say_is_no_failure(models_port: int) -> None:
    assert served_model(Gateway(host="127.0.0.1", port=models_port, uds="", grpc_listen=PRIVATE)) is None
    assert served_model(Gateway(host="127.0.0.1", port=1, uds="/nowhere", grpc_listen=PRIVATE)) is None
