"""What a setting costs in quality: next-token distributions of a model in other settings against float32, over the same tokens.

    .venv/bin/python -m tests.benchmarks.quality --settings bfloat16,bfloat16+int8,bfloat16+gguf

Half of the tokens are written by the model itself in float32 with fixed seeds, half are texts that come with Python and Debian, named by
their hash. Reported: the mean KL divergence from float32 to the setting, in nats, and how often the best token differs where float32's own
lead is at least 0.1 nat. The rule for a quantised setting: KL at most 0.005, and at most twice the disagreement of bfloat16.
"""

import argparse
import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from trivet_checkpoint import open_checkpoint, resolve_model
from trivet_kernels import reference
from trivet_kernels.api import PagedBatch
from trivet_worker.attention.caches import strided_view
from trivet_worker.config import WorkerSettings
from trivet_worker.forward_context import ForwardContext, forward_context
from trivet_worker.models.native_llama import NativeLlama, formats_of
from trivet_worker.weights import loader
from trivet_worker.weights.quantization import Quantization

WINDOW, BLOCK = 512, 16
MARGIN = 0.1  # nats
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TEXTS = {  # file → SHA-256 of its first half million bytes
    Path("/usr/share/common-licenses/GPL-3"): "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986",
    Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py": "4cfcf6cd6f8da9270f3c246b8d693ebfdb40deb4411c8e5851e449a6082de234",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A dtype, and how weights and the KV cache are kept: `dtype+quantization+kv dtype`, of which the latter may be absent."""

    dtype: str
    quantization: Quantization
    kv_dtype: str = "auto"

    @classmethod
    def parse(cls, text: str) -> "Setting":
        dtype, quantization, kv_dtype, *_ = [*text.split("+"), "", ""]
        return cls(dtype, quantization or "none", kv_dtype or "auto")  # type: ignore[arg-type]

    def __str__(self) -> str:
        quantization = "" if self.quantization == "none" else f", {self.quantization}"
        return f"{self.dtype}{quantization}" + ("" if self.kv_dtype == "auto" else f", KV {self.kv_dtype}")


class Scorer:
    """A model in one setting, asked for the logits of every token of some windows at once."""

    def __init__(self, setting: Setting, model: str, threads: int, windows: int = 1) -> None:
        checkpoint = open_checkpoint(resolve_model(model))
        dtype = DTYPES[setting.dtype]
        formats = formats_of(checkpoint, dtype, setting.quantization)
        self.model = NativeLlama(
            checkpoint.config,
            dtype=dtype,
            kv_dtype=torch.int8 if setting.kv_dtype == "int8" else dtype,
            formats=formats,
            max_model_len=WINDOW,
            most_tokens=WINDOW,
            threads=threads,
        )
        loader.load_weights(checkpoint, self.model.placements(), lambda done, total: None)
        self.tables = torch.arange(1, windows * WINDOW // BLOCK + 1).view(windows, -1)
        blocks = self.tables.numel() + 1
        self.caches = {
            cache.layer: strided_view(torch.zeros(blocks * cache.page_bytes(BLOCK), dtype=torch.int8), cache, blocks, BLOCK)
            for cache in self.model.layer_caches()
        }

    def logits(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """float32 `[W, n, vocabulary]` of token ids int64 `[W, n]` at positions from `first` on."""
        windows, count = ids.shape
        positions = torch.arange(first, first + count)
        slots = self.tables[:windows, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = PagedBatch(
            query_starts=tuple(range(0, windows * count + 1, count)),
            seq_lens=(first + count,) * windows,
            seq_lens_tensor=torch.full((windows,), first + count),
            block_table=self.tables[:windows],
            slot_mapping=slots.reshape(-1),
            num_decodes=windows if count == 1 else 0,
        )
        rows = torch.arange(windows * count)
        with torch.inference_mode(), forward_context(ForwardContext(reference, batch, self.caches)):
            flat = self.model.step(ids.reshape(-1), positions.repeat(windows), rows, wants_hidden=False).logits
        return flat.view(windows, count, -1)


def written_by_itself(scorer: Scorer, windows: int, seed: int = 1) -> torch.Tensor:
    """Token ids int64 `[windows, WINDOW]` that the model writes at temperature 1, each window from a token drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 40_000, (windows, 1), generator=generator)
    for place in track(range(WINDOW - 1), "writing", transient=True):
        shares = torch.softmax(scorer.logits(ids[:, -1:], place)[:, 0], dim=-1)
        ids = torch.cat([ids, torch.multinomial(shares, 1, generator=generator)], dim=1)
    return ids


def from_texts(tokenizer: Tokenizer, windows: int) -> torch.Tensor:
    """Token ids int64 `[windows, WINDOW]` out of the texts, in order."""
    ids: list[int] = []
    for path, digest in TEXTS.items():
        data = path.read_bytes()[: 1 << 19]
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            print(f"{path} is another text than the figures in the docs were made with ({found})", file=sys.stderr)
        ids += tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False).ids
    whole = torch.tensor(ids[: windows * WINDOW])
    assert len(whole) == windows * WINDOW, f"the texts have {len(ids)} tokens, fewer than the {windows * WINDOW} asked for"
    return whole.view(windows, WINDOW)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", default="bfloat16,bfloat16+int8,bfloat16+gguf", help="dtype, or dtype+quantization, separated by commas"
    )
    parser.add_argument("--tokens", type=int, default=20_480, help="half written by the model, half out of texts")
    parser.add_argument("--model", default=WorkerSettings().model, help="GGUF file or folder; none: the embedded default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    half = -(-arguments.tokens // 2 // WINDOW)
    exact = Scorer(Setting("float32", "none"), arguments.model, arguments.threads, windows=half)
    tokenizer = Tokenizer.from_str(open_checkpoint(resolve_model(arguments.model)).tokenizer_json().decode())
    windows = torch.cat([written_by_itself(exact, half), from_texts(tokenizer, half)])
    settings = [Setting.parse(text) for text in arguments.settings.split(",")]
    scorers = [Scorer(setting, arguments.model, arguments.threads) for setting in settings]
    divergence, differing, led = np.zeros(len(settings)), np.zeros(len(settings)), 0
    total = 0
    for ids in track(windows, "comparing", transient=True):
        expected = torch.log_softmax(exact.logits(ids[None])[0].double(), dim=-1)
        best = expected.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] >= MARGIN
        led, total = led + int(clear.sum()), total + len(ids)
        for index, scorer in enumerate(scorers):
            got = torch.log_softmax(scorer.logits(ids[None])[0].double(), dim=-1)
            divergence[index] += float((expected.exp() * (expected - got)).sum())
            differing[index] += int((clear & (got.argmax(dim=-1) != best.indices[:, 0])).sum())
    table = Table("setting", "mean KL", f"best token differs (lead ≥ {MARGIN} nat)", box=MARKDOWN)
    for setting, kl, count in zip(settings, divergence, differing, strict=True):
        table.add_row(str(setting), f"{kl / total:.5f}", f"{100 * count / led:.3f} %")
    Console().print(f"{total} tokens, {led} with a clear best token")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
