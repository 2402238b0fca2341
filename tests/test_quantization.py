"""Weights that are kept otherwise than in the dtype of the computation: what runs, and what is refused with the way out."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment import deployed
from tests.gateway import calling
from trivet import LLM, SamplingParams

QUESTION = "The capital of France is"


async def test_a_question_is_answered_on_the_weights_of_a_gguf_file_in_place() -> None:
    serving = deployed("--quantization", "gguf", "--num-kv-blocks", "200", dtype="bfloat16")
    async with serving as deployment, calling(deployment.base_url) as gateway:
        answer = await gateway.complete(QUESTION, max_tokens=8)
        assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic"])
def test_a_question_is_answered_on_quantised_weights(quantization: str) -> None:
    with LLM(quantization=quantization, num_kv_blocks=200, dtype="bfloat16", inprocess=True) as llm:
        [output] = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=8))
        assert "Paris" in output.outputs[0].text


def test_a_backend_that_runs_no_quantised_weights_refuses_them(tmp_path: Path) -> None:
    words = ("--quantization=gguf", "--attention-backend=torch", f"--scheduler=unix:{tmp_path}/none.sock", "--listen=", "--metrics-listen=")
    answer = subprocess.run([sys.executable, "-m", "trivet_worker", *words], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "quantization gguf: only the attention backend cpu runs quantised weights" in answer.stdout + answer.stderr
