"""Makes `greedy.json`: what the transformers library continues twenty prompts with, to hold the services against.

The model is built by transformers out of the packaged GGUF file with its weights dequantised, in float32; the ids of the prompts come
from `trivet_checkpoint`'s tokenizer, because the one that transformers builds from this file doesn't split digits. The continuation takes
the largest logit 64 times and goes on through the end-of-sequence token, so the services have to be asked with `ignore_eos`.

Each record keeps the gap between the two largest logits of every step. A prompt with a gap of 1e-3 or less anywhere is rejected, since
rounding could decide there; so an unequal token means a fault. Run it in the repository's root:
`python -m tests.references.make_greedy`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from trivet_checkpoint import open_checkpoint, resolve_model

from tests.references.model import continue_greedily, reference_model
from tests.references.prompts import PROMPTS, Prompt

OUTPUT_TOKENS = 64
LEAST_GAP = 1e-3
WANTED = {"short": 4, "chat": 4, "code": 3, "language": 6, "long": 3}
"""How many prompts of each kind are kept: twenty."""

TARGET = Path(__file__).with_name("greedy.json")


def right_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(open_checkpoint(resolve_model(None)).tokenizer_json().decode())


def record(model: Any, tokenizer: Tokenizer, prompt: Prompt) -> dict[str, Any]:
    prompt_ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
    output_ids, gaps = continue_greedily(model, prompt_ids, OUTPUT_TOKENS)
    return {"name": prompt.name, "kind": prompt.kind, "prompt_ids": prompt_ids, "output_ids": output_ids, "gaps": gaps}


def main() -> None:
    torch.set_num_threads(2)
    model, tokenizer = reference_model(), right_tokenizer()
    left = dict(WANTED)
    records = []
    for prompt in PROMPTS:
        if not left[prompt.kind]:
            continue
        made = record(model, tokenizer, prompt)
        least = min(made["gaps"])
        verdict = "kept" if least > LEAST_GAP else "rejected"
        print(f"{prompt.name}: {len(made['prompt_ids'])} tokens, smallest gap {least:.6f}, {verdict}")
        print("   ", repr(tokenizer.decode(made["output_ids"], skip_special_tokens=False)))
        if least > LEAST_GAP:
            records.append(made)
            left[prompt.kind] -= 1
    if any(left.values()):
        sys.exit(f"too few prompts without a near tie: {left} are missing")
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in records)
    TARGET.write_text(f"[\n{lines}\n]\n")
    print(f"{len(records)} references in {TARGET}, smallest gap {min(min(each['gaps']) for each in records):.6f}")


if __name__ == "__main__":
    main()
