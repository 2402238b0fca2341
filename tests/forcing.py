"""Makes the real model generate given ids in a given order, with nothing but request fields.

Only the wanted ids are allowed, with biases that fall along the list by more than logits differ; a repetition penalty of 100 divides the
logit of each id that was taken to next to nothing, so the next one leads. That works for a few ids that are all different and that are
not in the prompt.
"""

from typing import Any

PROMPT = "Answer:"
GREATEST, LEAST = 100.0, 10.0


def forcing(ids: list[int]) -> dict[str, Any]:
    """Request fields under which `ids` are generated, one after the other."""
    assert len(set(ids)) == len(ids) <= 4
    fall = (GREATEST - LEAST) / max(1, len(ids) - 1)
    return {
        "allowed_token_ids": ids,
        "logit_bias": {str(token): GREATEST - place * fall for place, token in enumerate(ids)},
        "repetition_penalty": 100,
        "max_tokens": len(ids),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
