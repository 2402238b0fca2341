"""Makes `penalised.json`: greedy continuations under each penalty, worked out from the logits of transformers' model in float32.

The arithmetic is written out here once more, apart from the worker's: repetition divides positive and multiplies negative logits of every
id in the prompt or the output; presence and frequency take from the logits of ids in the output only. Near ties are rejected as in
`make_greedy.py`, whose model this uses. Run it in the repository's root: `python -m tests.references.make_penalised`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.references.make_greedy import LEAST_GAP
from tests.references.model import reference_model

TARGET = Path(__file__).with_name("penalised.json")

PARIS_THRICE = [38634, 7042, 7042]
OUTPUT_TOKENS = 24

PENALTIES: tuple[dict[str, float], ...] = (
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
)


def penalised(logits: torch.Tensor, prompt_ids: list[int], output_ids: list[int], penalties: dict[str, float]) -> torch.Tensor:
    """`logits` [vocabulary] as the next token is chosen from."""
    changed = logits.clone()
    repetition = penalties.get("repetition_penalty", 1.0)
    for token in {*prompt_ids, *output_ids}:
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token, count in Counter(output_ids).items():
        changed[token] -= penalties.get("presence_penalty", 0.0) + penalties.get("frequency_penalty", 0.0) * count
    return changed


@torch.inference_mode()
def continue_penalised(model: Any, prompt_ids: list[int], penalties: dict[str, float]) -> dict[str, Any]:
    output_ids: list[int] = []
    gaps: list[float] = []
    for _ in range(OUTPUT_TOKENS):
        logits = model(torch.tensor([prompt_ids + output_ids]), logits_to_keep=1).logits[0, -1]
        best = torch.topk(penalised(logits, prompt_ids, output_ids, penalties), 2)
        output_ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
    return {"penalties": penalties, "prompt_ids": prompt_ids, "output_ids": output_ids, "gaps": gaps}


def main() -> None:
    torch.set_num_threads(2)
    model = reference_model()
    records = [continue_penalised(model, PARIS_THRICE, penalties) for penalties in PENALTIES]
    for record in records:
        print(record["penalties"], record["output_ids"], f"smallest gap {min(record['gaps']):.6f}")
        if min(record["gaps"]) <= LEAST_GAP:
            sys.exit("a near tie: change the penalties or the number of tokens")
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in records)
    TARGET.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
