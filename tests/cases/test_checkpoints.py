"""The same model in other files is the same model, from the row order of q and k to a head that is tied, copied or missing.

The files hold weights that float16 can hold, so most comparisons are exact. What differs between the folders with tied heads is the head
alone; two of the model's layers are enough to show it. A folder, a GGUF file and a refusal go through `trivet serve`; the others are run by
the same worker in this process, since a start takes seconds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from trivet_checkpoint import open_checkpoint

from tests.checkpoint_files import Weights, rounded_model, weights_of, write_folder, write_gguf
from tests.deployment import deployed
from tests.gateway import Gateway, calling, ids_of, together
from tests.references.greedy import read_references
from tests.references.model import continue_greedily
from trivet import LLM, SamplingParams, TrivetError

KIND = gguf.GGMLQuantizationType
OUTPUT_TOKENS = 16
PROMPTS = [list(each.prompt_ids) for each in read_references() if len(each.prompt_ids) < 100]
LEAST_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class Original:
    """A model, its weights, and how transformers continues four prompts with it, none of them near a tie."""

    model: Any
    weights: Weights
    prompts: list[list[int]]
    continuations: list[list[int]]


def original(layers: int | None) -> Original:
    model = rounded_model(layers)
    prompts, continuations = [], []
    for prompt in PROMPTS:
        continuation, gaps = continue_greedily(model, prompt, OUTPUT_TOKENS)
        if min(gaps) > LEAST_GAP:
            prompts.append(prompt)
            continuations.append(continuation)
        if len(prompts) == 4:
            break
    assert len(prompts) == 4
    return Original(model, weights_of(model), prompts, continuations)


@pytest.fixture(scope="module")
def whole() -> Original:
    return original(None)


@pytest.fixture(scope="module")
def two_layers() -> Original:
    return original(2)


async def continued(gateway: Gateway, prompts: Sequence[list[int]]) -> list[list[int]]:
    wishes = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return [ids_of(answer) for answer in await together(*(gateway.complete(prompt, **wishes) for prompt in prompts))]


def run(model: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The continuations, made in this process."""
    greedily = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(model, dtype="float32", num_kv_blocks=100, inprocess=True) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedily)]


async def likeliest(gateway: Gateway, prompts: Sequence[list[int]]) -> list[str]:
    """The most probable id at every place of every prompt but the first."""
    answers = await together(*(gateway.complete(prompt, prompt_logprobs=1, max_tokens=1) for prompt in prompts))
    return [
        max(entry, key=lambda token: entry[token]["logprob"]) for answer in answers for entry in answer["choices"][0]["prompt_logprobs"][1:]
    ]


# The row order of q and k


@pytest.mark.parametrize(("kind", "least"), [(KIND.F16, 0.99999), (KIND.Q8_0, 0.99), (KIND.Q4_1, 0.99)], ids=["F16", "Q8_0", "Q4_1"])
def test_every_tensor_of_a_gguf_file_points_where_the_original_does(
    whole: Original, tmp_path: Path, kind: gguf.GGMLQuantizationType, least: float
) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", whole.weights, kind, extra=True))
    assert checkpoint.config["rope_theta"] == 100000
    wrong = []
    for name, value in whole.weights.items():
        loaded, wanted = checkpoint.load(name).reshape(-1).astype(np.float64), value.numpy().reshape(-1).astype(np.float64)
        cosine = loaded @ wanted / (np.linalg.norm(loaded) * np.linalg.norm(wanted))
        if not cosine > least:
            wrong.append(f"{name}: {cosine:.6f}")
    assert not wrong, "\n".join(wrong)


def test_the_rows_of_an_architecture_that_is_not_reordered_are_left_alone(two_layers: Original, tmp_path: Path) -> None:
    """qwen2's converter writes q and k as they are; a file of the same tensors under that name must be read so."""
    file = write_gguf(tmp_path / "llama.gguf", two_layers.weights, KIND.F16)
    reordered = open_checkpoint(file)
    renamed = tmp_path / "qwen2.gguf"
    # Of equal length in the header: only the keys' architecture changes.
    content = file.read_bytes()
    tensors_at = content.index(b"token_embd.weight")
    header = content[:tensors_at].replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00qwen2")
    renamed.write_bytes(header.replace(b"llama.", b"qwen2.") + content[tensors_at:])
    plain = open_checkpoint(renamed)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = plain.read(name).view(np.float16).reshape(plain.tensors[name].shape)
    assert np.array_equal(plain.load(name), stored.astype(np.float32))
    assert not np.array_equal(reordered.load(name), stored.astype(np.float32))


def test_the_rope_base_is_taken_from_the_file(two_layers: Original, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", two_layers.weights, KIND.F16)
    content = file.read_bytes()
    stored = b"llama.rope.freq_base" + (6).to_bytes(4, "little") + np.float32(100000).tobytes()
    assert content.count(stored) == 1
    file.write_bytes(content.replace(stored, stored[:-4] + np.float32(12345).tobytes()))
    assert open_checkpoint(file).config["rope_theta"] == 12345


async def test_an_f16_gguf_file_and_a_folder_continue_alike_and_q8_0_nearly(whole: Original, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", whole.model, whole.weights)
    async with deployed(model=folder) as deployment, calling(deployment.base_url) as gateway:
        assert await continued(gateway, whole.prompts) == whole.continuations
        best_of_folder = await likeliest(gateway, PROMPTS)
    f16 = write_gguf(tmp_path / "f16.gguf", whole.weights, KIND.F16, extra=True)
    assert run(f16, whole.prompts) == whole.continuations
    q8_0 = write_gguf(tmp_path / "q8_0.gguf", whole.weights, KIND.Q8_0)
    async with deployed(model=q8_0) as deployment, calling(deployment.base_url) as gateway:
        best_of_q8_0 = await likeliest(gateway, PROMPTS)
    equal = sum(ours == theirs for ours, theirs in zip(best_of_q8_0, best_of_folder, strict=True))
    assert equal >= 0.95 * len(best_of_folder)


# The tied head; a GGUF file without an output tensor is the default model itself: `tests/test_greedy.py`


def test_a_folder_with_a_tied_head_and_no_tensor_for_it_runs(two_layers: Original, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "b", two_layers.model, two_layers.weights, tie_word_embeddings=True)
    assert run(folder, two_layers.prompts) == two_layers.continuations


def test_a_folder_with_a_tied_head_and_a_copy_of_it_runs(two_layers: Original, tmp_path: Path) -> None:
    weights = two_layers.weights | {"lm_head.weight": two_layers.weights["model.embed_tokens.weight"]}
    folder = write_folder(tmp_path / "c", two_layers.model, weights, tie_word_embeddings=True)
    assert run(folder, two_layers.prompts) == two_layers.continuations


async def test_a_folder_with_a_tied_head_and_another_one_follows_its_config_with_a_warning(two_layers: Original, tmp_path: Path) -> None:
    other = torch.roll(two_layers.weights["model.embed_tokens.weight"], 1, dims=0)
    folder = write_folder(tmp_path / "d", two_layers.model, two_layers.weights | {"lm_head.weight": other}, tie_word_embeddings=True)
    async with deployed(model=folder) as deployment, calling(deployment.base_url) as gateway:
        assert await continued(gateway, two_layers.prompts) == two_layers.continuations
        assert any("lm_head" in line and "warning" in line.lower() for line in deployment.log().splitlines())


def test_a_quantised_file_whose_embedding_and_head_are_not_quantised_runs(two_layers: Original, tmp_path: Path) -> None:
    embedding = two_layers.weights["model.embed_tokens.weight"]
    weights = two_layers.weights | {"lm_head.weight": embedding}
    file = write_gguf(tmp_path / "e.gguf", weights, KIND.Q8_0, unquantised=("model.embed_tokens.weight", "lm_head.weight"))
    checkpoint = open_checkpoint(file)
    with torch.no_grad():
        for name, parameter in two_layers.model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(checkpoint.load(name))))
        wanted = [continue_greedily(two_layers.model, prompt, OUTPUT_TOKENS) for prompt in two_layers.prompts]
        for name, parameter in two_layers.model.named_parameters():
            parameter.copy_(two_layers.weights[name])
    for ours, (theirs, gaps) in zip(run(file, two_layers.prompts), wanted, strict=True):
        sure = next((place for place, gap in enumerate(gaps) if gap <= LEAST_GAP), OUTPUT_TOKENS)
        assert ours[:sure] == theirs[:sure]


def test_a_folder_whose_config_does_not_speak_of_tying_runs(two_layers: Original, tmp_path: Path) -> None:
    weights = two_layers.weights | {"lm_head.weight": two_layers.weights["model.embed_tokens.weight"]}
    folder = write_folder(tmp_path / "f", two_layers.model, weights, left_out="tie_word_embeddings")
    assert run(folder, two_layers.prompts) == two_layers.continuations


def without(missing: str, original: Original, folder: Path) -> Path:
    """A folder that lacks a weight which its config asks for."""
    weights = {name: value for name, value in original.weights.items() if name != missing}
    return write_folder(folder, original.model, weights, tie_word_embeddings=missing != "lm_head.weight")


async def test_a_missing_head_stops_the_start_with_its_name(two_layers: Original, tmp_path: Path) -> None:
    folder = without("lm_head.weight", two_layers, tmp_path / "g")
    with pytest.raises(AssertionError, match="ended while starting") as caught:
        async with deployed("--max-restarts", "0", model=folder):
            pass
    assert "lm_head.weight" in str(caught.value)


def test_a_missing_weight_of_a_layer_is_refused_with_its_name(two_layers: Original, tmp_path: Path) -> None:
    missing = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(TrivetError, match=re.escape(missing)):
        run(without(missing, two_layers, tmp_path / "h"), two_layers.prompts)
