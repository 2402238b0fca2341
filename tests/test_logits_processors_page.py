"""The class of `docs/logits-processors.md` in a running suite, named and asked as the page says."""

import os
import re
from itertools import pairwise
from pathlib import Path

from tests.deployment import ROOT, deployed
from tests.gateway import calling

PAGE = (ROOT / "docs" / "logits-processors.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


async def test_the_example_of_the_page_runs_in_the_worker(tmp_path: Path) -> None:
    assert [language for language, _ in BLOCKS] == ["python", "text"]
    [flags] = re.findall(r"trivet serve (.*)", BLOCKS[1][1])
    (tmp_path / "ngrams.py").write_text(BLOCKS[0][1])
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with deployed(*flags.split(), variables={"PYTHONPATH": path}) as server, calling(server.base_url) as gateway:
        asked = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "logit_bias": {"504": 40, "617": 40}}
        answers = [await gateway.complete("Row, row", **asked, logits_processors_args=given) for given in (None, {"no_repeat_ngram": 2})]
        freely, held = (list(pairwise(answer["choices"][0]["token_ids"])) for answer in answers)
        assert len(set(freely)) < len(freely)
        assert len(set(held)) == len(held)
        refused = await gateway.post("/v1/completions", {"prompt": "Row", "logits_processors_args": {"no_repeat_ngram": "two"}})
        assert refused.status_code == 500
        assert "a logits processor of the worker failed on this request" in refused.text
        assert len((await gateway.complete("Row", max_tokens=2))["choices"]) == 1
