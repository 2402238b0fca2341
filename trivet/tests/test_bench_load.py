"""The load generator: bodies that never repeat, arrivals at their rate, streams cut anywhere, figures that add up."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivet.bench.load.arrivals import Arrivals
from trivet.bench.load.exchange import Exchange, Target
from trivet.bench.load.figures import Objective, medians, summarize
from trivet.bench.load.prompts import WORDS, BodyOptions, Endpoint, PromptForm, make_bodies
from trivet.bench.load.stream import Answer, Failure, read
from trivet.bench.load.workloads import WORKLOADS, Overrides, chosen_workloads
from trivet_proto.errors import TrivetError

OPTIONS = BodyOptions(PromptForm.WORDS, range(10, 400), Endpoint.COMPLETIONS, ignore_eos=True, extra={})


def event(text: str = "", **fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "index": 0, "logprobs": None}], **fields}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
EVENTS = (event("Once"), event(" upon"), event(""), event(" a time"), event(usage=USAGE), b"data: [DONE]\n\n")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in EVENTS) + b"0\r\n\r\n"
PLAIN = HEAD + b"\r\n" + b"".join(EVENTS)


def exchange_of(pieces: list[bytes]) -> Exchange:
    """Which arrive at seconds 1, 2, 3 and so on."""
    return Exchange(0.0, [(1.0 + index, piece) for index, piece in enumerate(pieces)])


def test_the_vocabulary_has_no_word_twice() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400


def test_bodies_follow_from_the_seed_and_another_seed_shares_nothing() -> None:
    once, again, other = (make_bodies(WORKLOADS["W2"], seed, OPTIONS, "m") for seed in ("1", "1", "2"))
    assert once == again
    assert len({*once, *other}) == len(once) + len(other)


def test_prompts_of_a_shared_prefix_begin_alike_and_go_on_apart() -> None:
    workload = Overrides(shared_tokens=30, input_tokens=5, requests=3).apply(WORKLOADS["W3"])
    prompts = [json.loads(body)["prompt"].split() for body in make_bodies(workload, "1", OPTIONS, None)]
    assert [len(prompt) for prompt in prompts] == [35, 35, 35]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 3


def test_token_ids_and_chat_are_asked_for_in_their_fields() -> None:
    ids = BodyOptions(PromptForm.IDS, range(10, 400), Endpoint.COMPLETIONS, ignore_eos=True, extra={"top_k": 1})
    body = json.loads(make_bodies(WORKLOADS["W1"], "1", ids, "m")[0])
    assert len(body["prompt"]) == 128
    assert all(10 <= token < 400 for token in body["prompt"])
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["top_k"]) == ("m", 128, True, 1)
    chat = BodyOptions(PromptForm.WORDS, range(0), Endpoint.CHAT, ignore_eos=False, extra={})
    body = json.loads(make_bodies(WORKLOADS["W1"], "1", chat, None)[0])
    assert len(body["messages"][0]["content"].split()) == 128
    assert not {"model", "ignore_eos", "prompt"} & body.keys()


def test_shared_conversations_have_lengths_of_their_own() -> None:
    workload = Overrides(requests=400).apply(WORKLOADS["sharegpt"])
    bodies = [json.loads(body) for body in make_bodies(workload, "1", OPTIONS, None)]
    prompts, answers = [len(body["prompt"].split()) for body in bodies], [body["max_tokens"] for body in bodies]
    for lengths in (prompts, answers):
        assert 150 < sum(lengths) / len(lengths) < 260
        assert max(lengths) > 600
        assert min(lengths) >= 4


def test_an_unknown_workload_is_answered_with_the_nearest() -> None:
    with pytest.raises(TrivetError, match="did you mean sharegpt"):
        chosen_workloads("W1,sharegtp", Overrides())


@pytest.mark.parametrize("burst", [1, 5])
def test_arrivals_keep_their_rate_and_come_in_bursts(burst: int) -> None:
    times = Arrivals(20.0, burst).times(2000, "1")
    assert times[0] == 0
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(20.0, rel=0.15)
    assert len(set(times)) == 2000 / burst


@settings(max_examples=200, deadline=None)
@given(data=st.data(), whole=st.sampled_from([CHUNKED, PLAIN]))
def test_a_stream_reads_the_same_however_it_was_cut(data: st.DataObject, whole: bytes) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read(exchange_of(pieces))
    assert isinstance(answer, Answer)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens, answer.counted) == (7, 4, 5, True)
    assert len(answer.gaps) == 2
    assert sum(answer.gaps) + answer.ttft <= answer.end_to_end <= len(pieces)


def test_an_event_is_stamped_with_the_arrival_of_its_last_byte() -> None:
    first = EVENTS[0]
    answer = read(exchange_of([HEAD + b"\r\n", first[:9], first[9:], EVENTS[1], b"".join(EVENTS[2:])]))
    assert isinstance(answer, Answer)
    assert (answer.ttft, answer.gaps, answer.end_to_end) == (3.0, (1.0, 1.0), 5.0)
    assert answer.tpot == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "no answer"),
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\n", b'{"error": "later"}'], "429 Too Many Requests: .*later"),
        ([HEAD + b"\r\n" + EVENTS[0]], "broke off"),
        ([HEAD + b"\r\n" + EVENTS[-1]], "no text"),
        ([HEAD + b"\r\n" + EVENTS[0], b'data: {"error": {"message": "lost"}}\n\n'], "error event: .*lost"),
        ([HEAD + b"\r\n" + b"data: {not json\n\n"], "not to be read"),
    ],
)
def test_what_is_no_answer_is_a_failure_with_its_reason(pieces: list[bytes], reason: str) -> None:
    failure = read(exchange_of(pieces))
    assert isinstance(failure, Failure)
    assert re.search(reason, failure.reason)


def answer_of(ttft: float, tpot: float, tokens: int = 11) -> Answer:
    return Answer(ttft, ttft + tpot * (tokens - 1), (tpot,) * (tokens - 1), 100, 0, tokens, True)


def test_goodput_counts_what_keeps_every_limit_and_failures_as_missed() -> None:
    results = [answer_of(0.1, 0.01), answer_of(0.9, 0.01), answer_of(0.1, 0.09), Failure("refused")]
    figures = summarize(results, 2.0, 0.1, Objective.parse("ttft=500,tpot=50"))
    assert (figures.goodput_share, figures.goodput_per_s) == (0.25, 0.5)
    assert (figures.answered, figures.failed, figures.failures) == (3, 1, ("refused",))
    assert (figures.output_tokens_per_s, figures.total_tokens_per_s) == (33 / 2, 333 / 2)
    assert figures.ttft_ms["p50"] == pytest.approx(100)
    assert figures.tpot_ms["p99"] == pytest.approx(90, rel=0.03)


def test_medians_are_of_runs_and_failures_add_up() -> None:
    runs = [summarize([answer_of(ttft, 0.01), Failure("x")], 1.0, 0.1, None) for ttft in (0.1, 0.2, 0.9)]
    middle = medians(runs)
    assert middle["ttft_ms"]["p50"] == pytest.approx(200)
    assert (middle["failed"], middle["answered"], middle["goodput_share"]) == (3, 1, None)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=fast", "speed=3", "ttft=-1"])
def test_an_objective_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(TrivetError, match="milliseconds by name"):
        Objective.parse(text)


@pytest.mark.parametrize("url", ["https://host", "host:8000", "http://", "http://host:port", "http://host/?a=1"])
def test_a_url_that_cannot_be_measured_is_refused(url: str) -> None:
    with pytest.raises(TrivetError, match="a server's root is wanted"):
        Target.parse(url, "/v1/completions", "", "--url")


def test_a_url_may_name_the_version_and_a_key_is_sent() -> None:
    target = Target.parse("http://host:81/below/v1/", "/v1/completions", "hush", "--url")
    assert (target.host, target.port) == ("host", 81)
    request = target.request(b"{}")
    assert request.startswith(b"POST /below/v1/completions HTTP/1.1\r\nHost: host:81\r\nAuthorization: Bearer hush\r\n")
    assert request.endswith(b"Content-Length: 2\r\n\r\n{}")
