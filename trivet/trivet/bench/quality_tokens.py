"""The tokens on which quality is measured: half written by the model itself, half out of texts that come with Python and Debian.

The texts are pinned by their hash: other ones give other figures, which is said and does not stop anything.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from trivet_checkpoint import open_checkpoint, resolve_model
from trivet_proto.errors import invalid

from trivet.bench.quality_scorer import WINDOW, Scorer

BYTES = 1 << 19
"""So much of each text is read."""

TEXTS: Mapping[Path, str] = {  # file → SHA-256 of its first half million bytes
    Path("/usr/share/common-licenses/GPL-3"): "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986",
    Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py": "4cfcf6cd6f8da9270f3c246b8d693ebfdb40deb4411c8e5851e449a6082de234",
}
FIRST_TOKENS = (1000, 40_000)
"""A window that the model writes begins with a token drawn from here."""


def written_by_itself(scorer: Scorer, windows: int, advance: Callable[[], None], seed: int = 1) -> torch.Tensor:
    """Token ids int64 `[windows, WINDOW]` at temperature 1; `advance` is called at each place."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(*FIRST_TOKENS, (windows, 1), generator=generator)
    for place in range(WINDOW - 1):
        shares = torch.softmax(scorer.logits(ids[:, -1:], place)[:, 0], dim=-1)
        ids = torch.cat([ids, torch.multinomial(shares, 1, generator=generator)], dim=1)
        advance()
    return ids


def from_texts(model: str, windows: int) -> torch.Tensor:
    """Token ids int64 `[windows, WINDOW]`, in order. Raises `TrivetError` where the texts are too short or not there."""
    tokenizer = Tokenizer.from_str(open_checkpoint(resolve_model(model)).tokenizer_json().decode())
    ids: list[int] = []
    for text in _texts():
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < windows * WINDOW:
        raise invalid(f"--tokens: the texts have {len(ids)} tokens, fewer than the {windows * WINDOW} that half of them needs")
    return torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)


def _texts() -> Iterator[str]:
    for path, digest in TEXTS.items():
        if not path.exists():
            print(f"{path} is not here: the figures are others than those of the docs", file=sys.stderr)
            continue
        data = path.read_bytes()[:BYTES]
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            print(f"{path} is another text than the figures in the docs were made with ({found})", file=sys.stderr)
        yield data.decode(errors="replace")
