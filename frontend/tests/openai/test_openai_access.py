"""Who may call and how calls are known: keys, public addresses, request ids, CORS, metrics."""

import httpx
import pytest
from trivet_proto.errors import ErrorKind, TrivetError

COMPLETIONS = "/v1/completions"


async def test_a_key_is_needed_where_one_is_set(start_frontend) -> None:
    async with start_frontend(api_key=("first", "second")) as frontend, httpx.AsyncClient(base_url=frontend.http_url) as http:
        for header in (None, "Bearer wrong", "first", "Basic first", "Bearer"):
            answer = await http.get("/v1/models", headers={} if header is None else {"Authorization": header})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("first", "second"):
            assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 401
        for path in ("/health", "/health/live", "/ping", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_a_public_address_needs_a_key_or_consent(start_frontend) -> None:
    with pytest.raises(TrivetError, match="api_key"):
        async with start_frontend(host="0.0.0.0"):
            pass
    with pytest.raises(TrivetError, match="api_key"):
        async with start_frontend(grpc_listen="0.0.0.0:0"):
            pass
    async with start_frontend(host="0.0.0.0", insecure=True):
        pass


async def test_an_address_in_use_is_an_error_that_says_so(start_frontend, frontend) -> None:
    port = int(frontend.http_url.rsplit(":", 1)[1])
    with pytest.raises(TrivetError, match="cannot listen"):
        async with start_frontend(port=port):
            pass


async def test_a_unix_socket_serves_and_is_removed(start_frontend, socket_folder) -> None:
    path = socket_folder / "http.sock"
    async with start_frontend(uds=str(path)):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://trivet") as http:
            assert (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status_code == 200
    assert not path.exists()


async def test_valid_request_ids_are_echoed_and_others_replaced(http) -> None:
    for given in ("abc-123", "A" * 128, "trace:1/2=x"):
        assert (await http.get("/version", headers={"X-Request-Id": given})).headers["x-request-id"] == given
    made = set()
    for given in ("A" * 129, "A" * 10_000, "with space", "", "ümlaut".encode("latin-1"), 'a"b', "a;b"):
        answer = await http.get("/version", headers={"X-Request-Id": given})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] != given
        made.add(answer.headers["x-request-id"])
    assert len(made) == 7
    answer = await http.post(COMPLETIONS, json={"prompt": ""}, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")


async def test_the_request_id_reaches_the_scheduler_and_may_come_twice(http, scheduler) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    answers = [await http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "twice"}) for _ in range(2)]
    assert [add.request_id for add in scheduler.adds] == ["twice", "twice"]
    assert scheduler.adds[0].uid != scheduler.adds[1].uid
    assert answers[0].json()["id"] != answers[1].json()["id"]


async def test_cors_is_off_unless_set(start_frontend, http) -> None:
    origin = {"Origin": "https://app.example"}
    assert "access-control-allow-origin" not in (await http.get("/version", headers=origin)).headers
    async with (
        start_frontend(allowed_origins=("https://app.example",), api_key=("k",)) as frontend,
        httpx.AsyncClient(base_url=frontend.http_url) as other,
    ):
        asked = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await other.options(COMPLETIONS, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        refused = await other.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


VLLM_NAMES = {
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
}


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_metrics_have_vllms_names_and_count(http, scheduler) -> None:
    for _ in range(2):
        await http.post(COMPLETIONS, json={"prompt": [1, 2, 3], "max_tokens": 4})
    scheduler.refusal = TrivetError(ErrorKind.INTERNAL, "no")
    await http.post(COMPLETIONS, json={"prompt": [1, 2, 3], "max_tokens": 4})
    answer = await http.get("/metrics")
    found = samples(answer.text)
    assert {name.split("{")[0] for name in found} >= VLLM_NAMES
    model = 'model_name="SmolLM2-135M-Instruct"'
    assert found[f'vllm:request_success_total{{finished_reason="length",{model}}}'] == 2
    assert found[f'vllm:request_success_total{{finished_reason="error",{model}}}'] == 1
    assert found[f"vllm:prompt_tokens_total{{{model}}}"] == 6
    assert found[f"vllm:generation_tokens_total{{{model}}}"] == 8
    assert found[f"vllm:time_to_first_token_seconds_count{{{model}}}"] == 2
    assert found[f"vllm:inter_token_latency_seconds_count{{{model}}}"] == 6
    assert found[f'vllm:kv_cache_usage_perc{{engine="fake",{model}}}'] == 0.25
    assert found[f'vllm:prefix_cache_hits_total{{engine="fake",{model}}}'] == 7
    assert found[f"trivet_frontend_requests_in_flight{{{model}}}"] == 0
    assert (await http.get("/load")).json() == {"server_load": 0}
