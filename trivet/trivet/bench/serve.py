"""Measure an OpenAI-compatible server under load, as its clients see it.

  trivet bench serve                              a `trivet serve` of its own, the four workloads
  trivet bench serve -- MODEL --dtype bfloat16    the same with flags for `trivet serve`
  trivet bench serve --url http://127.0.0.1:8000  a server that runs already
  trivet bench serve --against "NAME=COMMAND --port {port}" --runs 3
                                                  interleaved with another one, with ratios of the medians

Workloads: W1 one person talks (1 stream, 128 in, 128 out), W2 a small crowd (16 streams, 256/64), W3 one system prompt for all (8 streams,
1024 shared + 32 of own, 32 out), W4 long documents (2 streams, 3000/32); synthetic, shared-prefix and sharegpt for lengths of one's own.

TTFT counts from the start of connecting (of an open loop: from when the request was due) to the first event with text, ITL between events
with text, TPOT is the rest of the time over the tokens after the first, E2E to the end of the stream. Exit status 1 if a request failed.
"""

import argparse
import json
import math
import secrets
from pathlib import Path
from typing import Any

from trivet_proto.errors import invalid

from trivet.bench.load.arrivals import Arrivals
from trivet.bench.load.figures import Objective
from trivet.bench.load.prompts import BodyOptions, Endpoint, PromptForm
from trivet.bench.load.workloads import FOUR, Overrides, chosen_workloads
from trivet.bench.report import check_outputs, draw, write_json
from trivet.bench.serve_report import as_json, show
from trivet.bench.serve_run import Order, measure
from trivet.bench.server_under_test import ServerPlan
from trivet.bench.told_to_end import run_until_told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="root of a server that runs already; without it `trivet serve` is started, with the flags after --")
    parser.add_argument(
        "--against", action="append", default=[], metavar="URL|NAME=COMMAND", help="a server to compare with; may be repeated"
    )
    parser.add_argument("--workload", default=FOUR, metavar="NAMES", help="separated by commas")
    parser.add_argument("--runs", type=int, default=1, help="of each workload and server; tables show medians")
    parser.add_argument("--rate", type=float, help="open loop: requests a second, whatever the server does with them")
    parser.add_argument("--burst", type=int, default=1, help="open loop: so many at one moment; 1 is Poisson")
    parser.add_argument("--slo", metavar="NAME=MS,...", help="goodput: requests that keep these, such as ttft=500,tpot=50")
    for name, what in (
        ("concurrency", "requests in flight of a closed loop"),
        ("requests", "requests of a run"),
        ("input-tokens", "tokens of each prompt, beyond what is shared"),
        ("shared-tokens", "tokens that all prompts of a run begin with"),
        ("output-tokens", "tokens of each answer"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what}, instead of the workload's own")
    parser.add_argument("--prompts", type=PromptForm, choices=list(PromptForm), default=PromptForm.WORDS, help="words, or token ids")
    parser.add_argument("--vocabulary", default="3000:12000", metavar="FROM:TO", help="token ids are drawn from these")
    parser.add_argument("--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.COMPLETIONS)
    parser.add_argument("--model", help="name of the model; the first that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="fields to add to each body")
    parser.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="leave the field out, for servers that refuse it")
    parser.add_argument("--seed", help="of the prompts; another one each time when not given, so that no cache answers")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a request")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds for a server to start")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    order = check(arguments)
    check_outputs(arguments.json, arguments.plot)
    servers, runs = run_until_told(measure(order))
    show(order, servers, runs)
    content = as_json(order, servers, runs)
    write_json(arguments.json, "serve", content)
    draw("serve", content, arguments.plot)
    return 1 if any(each.figures.failed for each in runs) else 0


def check(arguments: argparse.Namespace) -> Order:
    """Raises `TrivetError` for what cannot be measured."""
    for name in ("runs", "burst", "concurrency", "requests", "input_tokens", "output_tokens", "rate", "timeout", "start_timeout"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise invalid(f"--{name.replace('_', '-')} {value}: more than 0 is wanted")
    if arguments.burst > 1 and arguments.rate is None:
        raise invalid("--burst belongs to an open loop: give --rate too")
    if arguments.url is not None and arguments.passed_on:
        raise invalid("flags after -- go to a `trivet serve` that is started here; with --url none is")
    overrides = Overrides(
        arguments.concurrency, arguments.requests, arguments.shared_tokens, arguments.input_tokens, arguments.output_tokens
    )
    own = ServerPlan.parse(arguments.url, "--url") if arguments.url is not None else ServerPlan.of_trivet(arguments.passed_on)
    servers = [own, *(ServerPlan.parse(text, "--against") for text in arguments.against)]
    if len({plan.name for plan in servers}) < len(servers):
        raise invalid("--against: two servers of one name; each needs its own")
    return Order(
        servers=servers,
        workloads=chosen_workloads(arguments.workload, overrides),
        runs=arguments.runs,
        seed=arguments.seed or secrets.token_hex(4),
        options=BodyOptions(
            arguments.prompts, _vocabulary(arguments.vocabulary), arguments.endpoint, arguments.ignore_eos, _extra(arguments.extra)
        ),
        model=arguments.model,
        arrivals=None if arguments.rate is None else Arrivals(arguments.rate, arguments.burst),
        objective=None if arguments.slo is None else Objective.parse(arguments.slo),
        api_key=arguments.api_key,
        timeout_s=arguments.timeout,
        start_timeout_s=arguments.start_timeout,
        warms_up=arguments.warm_up,
    )


def _vocabulary(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise invalid(f"--vocabulary {text}: two token ids are wanted, the first and the one behind the last, such as 3000:12000")
    return range(int(first), int(last))


def _extra(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise invalid(f"--extra {text}: a JSON object is wanted")
    return fields
