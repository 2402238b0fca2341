"""Measure what a setting costs in quality: next-token distributions against float32 on the dequantised weights, over the same tokens.

  trivet bench quality
  trivet bench quality --settings bfloat16,bfloat16+gguf --tokens 4096 --resume quality.state
  trivet bench quality --settings bfloat16+attention_backend=torch MODEL

A setting is a dtype, then perhaps a quantisation and other settings of the worker. attention_backend=torch is the model as it is usually
run, eager torch in that dtype: what the dtype itself costs. Half of the tokens are written by the model in float32 with fixed seeds, half
are texts that come with Python and Debian, pinned by their hash.

KL: the mean divergence from float32 to the setting, in nats. differs: how often the best token is another where float32's own lead is at
least 0.1 nat. A quantised setting holds with a KL of at most 0.005 and at most twice the disagreement of bfloat16.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from trivet_checkpoint import open_checkpoint, resolve_model
from trivet_proto.errors import invalid

from trivet.bench.quality_scorer import WINDOW, Scorer, available, parse_setting
from trivet.bench.quality_state import Compared, State, load_state, save_state
from trivet.bench.quality_tokens import from_texts, written_by_itself
from trivet.bench.report import Bar, check_outputs, progress_bar, show_table, write_json

DEFAULTS = (
    "bfloat16",
    "bfloat16+attention_backend=torch",
    "bfloat16+kv_dtype=int8",
    "bfloat16+int8",
    "bfloat16+gguf",
    "bfloat16+gguf+kv_dtype=int8",
)
MARGIN = 0.1  # nats
MOST_KL = 0.005
MOST_TIMES_BFLOAT16 = 2.0
YARDSTICK = "bfloat16"


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over all tokens; `holds` is None where nothing says what bfloat16 itself costs."""

    setting: str
    kl: float
    differs: float
    holds: bool | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="GGUF file or Hugging Face folder; none: the embedded default")
    parser.add_argument("--settings", default=",".join(available(DEFAULTS)), help="DTYPE[+QUANTISATION][+NAME=VALUE], separated by commas")
    parser.add_argument("--tokens", type=int, default=20_480, help=f"half by the model, half out of texts, in whole windows of {WINDOW}")
    parser.add_argument("--threads", type=int, help="compute threads; none: one per core")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is known there, and go on from it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 1:
        raise invalid(f"--tokens {arguments.tokens}: more than 0 is wanted")
    check_outputs(arguments.json, None)
    settings = arguments.settings.split(",")
    plans = [parse_setting(text, arguments.model, arguments.threads) for text in settings]
    half = -(-arguments.tokens // 2 // WINDOW)
    about = {"settings": arguments.settings, "tokens": str(2 * half * WINDOW), "model": _fingerprint(arguments.model)}
    state = load_state(arguments.resume, about)
    exact = Scorer(parse_setting("float32", arguments.model, arguments.threads), windows=half)
    scorers = [Scorer(plan) for plan in plans]
    with progress_bar(WINDOW - 1 + 2 * half) as bar:
        if not state.windows:
            bar.describe("the model writes")
            texts = from_texts(arguments.model, half)
            state.windows = torch.cat([written_by_itself(exact, half, lambda: _step(bar)), texts]).tolist()
            save_state(arguments.resume, state)
        bar.describe("comparing")
        for window in state.windows[len(state.compared) :]:
            state.compared.append(compare(exact, scorers, torch.tensor([window])))
            save_state(arguments.resume, state)
            _step(bar)
    report(settings, state, arguments.json)
    return 0


def compare(exact: Scorer, scorers: Sequence[Scorer], ids: torch.Tensor) -> Compared:
    """Each of `scorers` against `exact` over one window, int64 `[1, n]`."""
    expected = torch.log_softmax(exact.logits(ids)[0].double(), dim=-1)
    best = expected.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] >= MARGIN
    divergence, differing = [], []
    for scorer in scorers:
        got = torch.log_softmax(scorer.logits(ids)[0].double(), dim=-1)
        divergence.append(float((expected.exp() * (expected - got)).sum()))
        differing.append(int((clear & (got.argmax(dim=-1) != best.indices[:, 0])).sum()))
    return Compared(divergence, differing, int(clear.sum()), ids.numel())


def figures_of(settings: Sequence[str], compared: Sequence[Compared]) -> list[Figures]:
    tokens, led = sum(each.tokens for each in compared), sum(each.led for each in compared)
    means = {
        setting: (sum(each.divergence[index] for each in compared) / tokens, sum(each.differing[index] for each in compared) / max(1, led))
        for index, setting in enumerate(settings)
    }
    return [
        Figures(setting, kl, differs, None if YARDSTICK not in means else holds(kl, differs, means[YARDSTICK][1]))
        for setting, (kl, differs) in means.items()
    ]


def holds(kl: float, differs: float, yardstick: float) -> bool:
    return kl <= MOST_KL and differs <= MOST_TIMES_BFLOAT16 * yardstick


def report(settings: Sequence[str], state: State, json_file: Path | None) -> None:
    rows = figures_of(settings, state.compared)
    tokens, led = sum(each.tokens for each in state.compared), sum(each.led for each in state.compared)
    show_table(
        f"{tokens} tokens, {led} with a best token that leads by {MARGIN} nat; against float32",
        ["setting", "KL, nats", "differs", "holds"],
        [[row.setting, f"{row.kl:.5f}", f"{100 * row.differs:.3f} %", _word(row.holds)] for row in rows],
    )
    write_json(json_file, "quality", {"about": state.about, "tokens": tokens, "clear": led, "settings": [asdict(row) for row in rows]})


def _word(holds: bool | None) -> str:
    return "–" if holds is None else "yes" if holds else "no"


def _step(bar: Bar) -> None:
    bar.advance()
    bar.refresh()


def _fingerprint(model: str) -> str:
    return open_checkpoint(resolve_model(model)).fingerprint
