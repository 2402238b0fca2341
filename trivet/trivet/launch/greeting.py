"""The last word of a start: how to call what is now running. Asks the gateway for the model's name; changes nothing."""

import http.client
import json
import shlex
import socket
from collections.abc import Sequence

from trivet.launch.own_thread import in_own_thread
from trivet.launch.plan import Gateway, LaunchPlan
from trivet.output import discard_output

TIMEOUT_S = 5.0
EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64, "temperature": 0}
"""Short, and the same answer each time."""


async def greet(plan: LaunchPlan) -> None:
    """Print how to call the deployment."""
    model = await in_own_thread(lambda: served_model(plan.gateway), name="greeting")
    try:
        print(greeting(plan.gateway, model, plan.one_more_worker), flush=True)
    except BrokenPipeError:  # nobody reads it: no reason to stop
        discard_output()


def greeting(gateway: Gateway, model: str | None, one_more_worker: Sequence[str] = ()) -> str:
    """The text; `model` is None where the gateway didn't tell its name. `one_more_worker` is the command that adds one."""
    body = json.dumps(({"model": model} if model else {}) | EXAMPLE, ensure_ascii=False)
    words = [f"curl -s {base_url(gateway)}/v1/chat/completions -H 'Content-Type: application/json'"]
    if gateway.uds:
        words.append(f"--unix-socket {shlex.quote(gateway.uds)}")
    if gateway.api_key:
        words.append("-H 'Authorization: Bearer YOUR_KEY'")
    words.append(f"-d {shlex.quote(body)}")
    where = f"the socket {gateway.uds}" if gateway.uds else base_url(gateway)
    lines = [
        "",
        f"Serving {model or 'the model'} on {where}. Try:",
        "",
        "  " + " \\\n    ".join(words),
        "",
        f"OpenAI API: {base_url(gateway)}/v1 · models: /v1/models · health: /health · metrics: /metrics",
    ]
    if not gateway.grpc_listen.startswith("unix:"):
        lines.append(f"gRPC API (trivet.v1.InferenceService): {gateway.grpc_listen}")
    if one_more_worker:
        lines += ["", "One more worker, beside those that run:", "", "  " + shlex.join(one_more_worker), ""]
    lines.append("Ctrl-C stops it.\n")
    return "\n".join(lines)


def base_url(gateway: Gateway) -> str:
    """The URL for callers on this machine; an address that stands for all of them becomes the loopback one."""
    if gateway.uds:
        return "http://localhost"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"


def served_model(gateway: Gateway) -> str | None:
    """The first name in `/v1/models`, or None when the gateway doesn't say."""
    connection = (
        _UnixConnection(gateway.uds) if gateway.uds else http.client.HTTPConnection(_host(gateway), gateway.port, timeout=TIMEOUT_S)
    )
    headers = {"Authorization": f"Bearer {gateway.api_key}"} if gateway.api_key else {}
    try:
        connection.request("GET", "/v1/models", headers=headers)
        answer = json.loads(connection.getresponse().read())
        return str(answer["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None
    finally:
        connection.close()


def _host(gateway: Gateway) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
